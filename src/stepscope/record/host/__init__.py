"""Recording from beside the training process: the launcher, the sampler, telemetry and the manifest.

`launch.launch(options)` is the entry. It starts the command, watches it without touching its streams, and returns
what happened as an `Outcome`. Nothing here runs inside the user's process.
"""
