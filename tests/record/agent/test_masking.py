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
        (["--pass", "hunter", "--pw", "a", "--creds", "b"], ["--pass", "***", "--pw", "***", "--creds", "***"]),
        (["--key", "-AbC123xyz"], ["--key", "***"]),
        (["mysql", "-phunter"], ["mysql", "-p***"]),
        (["dump.sh", "-pHunter2"], ["dump.sh", "-p***"]),
        (["docker", "login", "-p", "hunter"], ["docker", "login", "-p", "***"]),
        (["srun", "-p", "a100", "-N2", "python"], ["srun", "-p", "a100", "-N2", "python"]),
        (["curl", "-u", "me:hunter2"], ["curl", "-u", "me:***"]),
        (["--config", '{"lr": 0.1, "api_key": "a b", "n": 2}'], ["--config", '{"lr": 0.1, "api_key": "***", "n": 2}']),
        (['--config={"db":{"password":"x,y"}}'], ['--config={"db":{"password":"***"}}']),
        (["--set", "{user: me, token: abc}"], ["--set", "{user: me, token: ***}"]),
        (["--header", "X-Auth: abc"], ["--header", "X-Auth: ***"]),
        (["-H", "X-Api-Key:abc"], ["-H", "X-Api-Key:***"]),
        (["--env=TOKEN=abc"], ["--env=TOKEN=***"]),
    ],
)
def test_values_after_secret_names(argv: list[str], masked: list[str]) -> None:
    assert mask_argv(argv) == masked


def test_addresses_keep_all_but_the_password() -> None:
    assert mask_text("postgres://user:pw@host/db") == "postgres://user:***@host/db"
    assert mask_text("https://host/x?token=abc&b=1") == "https://host/x?token=***&b=1"
    assert mask_text("https://host/path?b=1") == "https://host/path?b=1"


@pytest.mark.parametrize(
    "argument",
    [
        *("-p8888:8888", "-profile", "--pass-through", "--num_pass=2", "-P4", "user:me", "{lr: 0.1, key_dim: 64}"),
        *("meta-llama/Llama-3.1-8B-Instruct", "google/vit-base-patch16-224-in21k", "runs/Nov22_23-50-17_node01"),
        *("outputs/2026-11-22/exp_lr3e-4_bs256_wd0.1_seed42", "GPU-8f6e1c2a-1b2c-4d5e-9f00-112233445566"),
        *("--max-tokens=100", "--tokenizer=gpt2", "--num_tokens=5", "--key-dim=64"),
        *("--author=me", "--lr=0.1", "train.py"),
    ],
)
def test_ordinary_settings_stay(argument: str) -> None:
    assert mask_argv([argument, "value"]) == [argument, "value"]


@pytest.mark.parametrize(
    "value",
    [
        "Zx81kQp0vT5mWq7LbN3r",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "Tq3_8ZkLw0-PxVb7Yd2mRs5Nc9GhJf4K",
        *("sk-abcdefghijklmnopqrstuvwx", "sk-proj-abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnopqrst"),
        *("hf_abcdefghijklmnopqrst", "AKIAIOSFODNN7EXAMPLE", "github_pat_abcdefghijklmnop1234"),
    ],
)
def test_what_looks_like_a_key_is_masked_whatever_its_name(value: str) -> None:
    assert mask_argv(["--name", value, f"--run={value}"]) == ["--name", "***", "--run=***"]
    assert mask_text(f"worker {value}, idle") == "worker ***, idle"
    assert mask_argv([f"python train.py {value}"]) == ["python train.py ***"]


def test_a_long_command_line_is_cut() -> None:
    (text,) = mask_argv(["x " * 1_000_000])
    assert len(text) < 10_000
    many = mask_argv(["--key", "abc", *["x" * 100] * 20_000])
    assert many[:2] == ["--key", "***"]
    assert many[-1] == "..."
    assert sum(map(len, many)) < 70_000
