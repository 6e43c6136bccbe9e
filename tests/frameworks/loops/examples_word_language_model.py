"""The loop of pytorch/examples' word_language_model: no loader, parameters changed by hand, no optimizer."""

from __future__ import annotations

import torch
from control import Control
from torch import nn

VOCABULARY, WIDTH, BATCH, LENGTH = 500, 256, 20, 20


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, hidden: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, VOCABULARY), dim=1), hidden

    def init_hidden(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH)


def get_batch(source: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(LENGTH, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].view(-1)


def evaluate(model: Rnn, criterion: nn.Module, source: torch.Tensor) -> float:
    model.eval()
    total, hidden = 0.0, model.init_hidden()
    with torch.no_grad():
        for start in range(0, len(source) - 1, LENGTH):
            data, targets = get_batch(source, start)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def main() -> None:
    torch.manual_seed(0)
    control = Control(loader=False, evaluation_seen=False)
    corpus = torch.randint(0, VOCABULARY, (30 * LENGTH + 1, BATCH))
    held_out = torch.randint(0, VOCABULARY, (5 * LENGTH + 1, BATCH))
    model, criterion, rate = Rnn(), nn.NLLLoss(), 1.0
    for epoch in range(2):
        model.train()
        hidden = model.init_hidden()
        for start in range(0, len(corpus) - 1, LENGTH):
            data, targets = get_batch(corpus, start)
            model.zero_grad()
            hidden = tuple(state.detach() for state in hidden)
            with control.phase("forward"):
                output, hidden = model(data, hidden)
                loss = criterion(output, targets)
            control.loss(loss)
            with control.phase("backward"):
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            control.clipped(norm, model.parameters())
            with control.phase("other"):  # an update written by hand is nobody's phase
                for parameter in model.parameters():
                    parameter.data.add_(parameter.grad, alpha=-rate)
            control.step()
        with control.evaluation():
            print(f"end of epoch {epoch} valid loss {evaluate(model, criterion, held_out):.6f}")
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
