"""The loop of pytorch/examples' dcgan: three backward passes and two optimizers for each batch."""

from __future__ import annotations

import torch
from control import FEATURES, Control, Vectors, network
from torch import nn
from torch.utils.data import DataLoader

BATCH, LATENT = 64, 64


def main() -> None:
    torch.manual_seed(0)
    control = Control()
    generator, critic = network(LATENT, FEATURES, 512), network(FEATURES, 1, 512)
    criterion = nn.BCEWithLogitsLoss()
    of_critic = control.optimizer(torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999)), cuts=False)
    of_generator = control.optimizer(torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999)), cuts=False)
    loader = DataLoader(Vectors(25 * BATCH, control), batch_size=BATCH, shuffle=True)

    def passed(output: torch.Tensor, label: float) -> torch.Tensor:
        with control.phase("forward"):
            error = criterion(output, torch.full_like(output, label))
        with control.phase("backward"):
            error.backward()
        return error

    critic.forward = control.timed(critic.forward, "forward")  # type: ignore[method-assign]
    generator.forward = control.timed(generator.forward, "forward")  # type: ignore[method-assign]
    for epoch in range(2):
        for index, (real, _) in enumerate(loader):
            control.batch(len(real))
            critic.zero_grad()
            control.loss(passed(critic(real), 1.0))
            fake = generator(torch.randn(len(real), LATENT))
            control.loss(passed(critic(fake.detach()), 0.0))
            of_critic.step()
            generator.zero_grad()
            error = passed(critic(fake), 1.0)
            of_generator.step()
            control.step()
            if index % 10 == 0:
                print(f"[{epoch}][{index}] Loss_G: {error.item():.4f}")
    control.tell(loss=error.item())


if __name__ == "__main__":
    main()
