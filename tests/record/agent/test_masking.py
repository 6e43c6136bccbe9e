"""Secrets never reach a file; ordinary settings stay readable."""

from __future__ import annotations

import pytest

from stepscope.record.agent.masking import mask_argv, mask_text


@pytest.mark.parametrize(
    ("argv", "masked"),
    [
        (["--api-key", "abc", "x"], ["--api-key", "***", "x"]),
        (["--wandb_token=abc"], ["--wandb_token=***"]),
        (["DB_PASSWORD=hunter2", "python"], ["DB_PASSWORD=***", "python"]),
        (["--apiKey", "abc"], ["--apiKey", "***"]),
        (["--auth", "abc"], ["--auth", "***"]),
        (["--secret", "--lr", "0.1"], ["--secret", "--lr", "0.1"]),
        (["-c", "export HF_TOKEN=abc; python train.py"], ["-c", "export HF_TOKEN=*** python train.py"]),
        (["--hydra.credentials.file=a"], ["--hydra.credentials.file=***"]),
    ],
)
def test_values_after_secret_names(argv: list[str], masked: list[str]) -> None:
    assert mask_argv(argv) == masked


@pytest.mark.parametrize(
    "text",
    [
        "sk-abcdefghijklmnopqrstuvwx",
        "sk-proj-abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrst",
        "hf_abcdefghijklmnopqrst",
        "AKIAIOSFODNN7EXAMPLE",
        "github_pat_abcdefghijklmnop1234",
    ],
)
def test_tokens_of_well_known_services_anywhere(text: str) -> None:
    assert text not in mask_text("before " + text + " after")
    assert mask_argv(["--name", text]) == ["--name", "***"]


def test_addresses_keep_all_but_the_password() -> None:
    assert mask_text("postgres://user:pw@host/db") == "postgres://user:***@host/db"
    assert mask_text("https://host/x?token=abc&b=1") == "https://host/x?token=***&b=1"
    assert mask_text("https://host/path?b=1") == "https://host/path?b=1"


@pytest.mark.parametrize(
    "argument",
    ["--max-tokens=100", "--tokenizer=gpt2", "--num_tokens=5", "--key-dim=64", "--author=me", "--lr=0.1", "train.py"],
)
def test_ordinary_settings_stay(argument: str) -> None:
    assert mask_argv([argument, "value"]) == [argument, "value"]
