"""The loop of pytorch/examples' mnist: a convolutional network, a scheduler, `test` after each of two epochs."""

from __future__ import annotations

import torch
from control import Control, Vectors
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH, TEST_BATCH = 64, 250


class Digits(Vectors):
    """Pictures made of noise, in the shape of MNIST's."""

    def __init__(self, items: int, control: Control | None = None) -> None:
        super().__init__(items, control)
        self.pictures = torch.randint(0, 256, (items, 28, 28), generator=torch.Generator().manual_seed(items))

    def item(self, index: int) -> tuple[torch.Tensor, int]:
        return ((self.pictures[index].float() / 255)[None] - 0.1307) / 0.3081, index % 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    model.train()
    for index, (data, target) in enumerate(loader):
        control.batch(len(target))
        optimizer.zero_grad()
        with control.phase("forward"):
            loss = F.nll_loss(model(data), target)
        control.loss(loss)
        with control.phase("backward"):
            loss.backward()
        optimizer.step()
        if index % 10 == 0:
            print(f"Train Epoch: {epoch} [{index * len(data)}]\tLoss: {loss.item():.6f}")
    return loss.item()


def test(model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
            control.evaluated(len(target))
    print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {correct}\n")


control = Control()


def main() -> None:
    torch.manual_seed(0)
    # 20 batches and a last, smaller one, as 60,000 pictures give
    train_loader = DataLoader(Digits(20 * BATCH + 32, control), batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(Digits(4 * TEST_BATCH), batch_size=TEST_BATCH)
    model = Net()
    optimizer = control.optimizer(torch.optim.Adadelta(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        loss = train(model, train_loader, optimizer, epoch)
        with control.evaluation():
            test(model, test_loader)
        scheduler.step()
    control.tell(loss=loss)


if __name__ == "__main__":
    main()
