from pkgmod.work import train

print(f"trained {train()} steps")
