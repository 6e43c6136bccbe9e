"""The command behaves as it would without us: status, streams, signals, environment; and what its manifest says."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.record.host.command import CommandNotStarted
from stepscope.record.host.folder import git_root, git_state
from stepscope.record.host.launch import launch
from stepscope.record.host.options import RecordOptions
from stepscope.record.host.signals import AGAIN_SECONDS, MAX_STEPS_MARKER, MOST, StepLimit
from tests.record.host.launching import host_dir, is_alive, launcher, manifest, record, started, wait_for

pytestmark = pytest.mark.process

# Writes its pid, counts the signals it gets into a file, ends after `seconds` or on SIGTERM (status 5).
COUNTER = """
import os, signal, sys, time
folder, seconds = sys.argv[1], float(sys.argv[2])
def note(number, frame):
    with open(folder + "/got", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGABRT"):
    signal.signal(getattr(signal, name), note)
with open(folder + "/pid.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(folder + "/pid.part", folder + "/pid")
end = time.time() + seconds
while time.time() < end and not os.path.exists(folder + "/leave"):
    time.sleep(0.02)
"""


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    return path


def got(folder: Path) -> list[str]:
    path = folder / "got"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize(
    ("program", "status", "shell_exit"),
    [
        ("raise SystemExit(3)", 3, {"status": 3, "signal": None, "shell_status": 3}),
        ("import os; os.kill(os.getpid(), 9)", 137, {"status": None, "signal": 9, "shell_status": 137}),
    ],
)
def test_exit_status_is_the_commands_own(tmp_path: Path, program: str, status: int, shell_exit: object) -> None:
    done = record(tmp_path / "run", sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")
    assert manifest(tmp_path / "run")["exit"] == shell_exit


def test_streams_are_byte_identical_and_the_command_may_fork(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "sys.stdout.buffer.write(b'\\x00\\xff out\\r\\n'); sys.stdout.flush()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.write(1, b'child\\n'); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "sys.stderr.write(sys.stdin.readline().upper())\n"
        "raise ValueError('mine')\n"
    )
    plain = subprocess.run([sys.executable, "-c", program], input=b"typed\n", capture_output=True)
    recorded = record(tmp_path / "run", sys.executable, "-c", program, input=b"typed\n")
    assert plain.returncode == 1
    assert (recorded.returncode, recorded.stdout, recorded.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_the_command_sees_the_same_terminal_signals_group_and_descriptors(tmp_path: Path) -> None:
    program = (
        "import json, os, signal, sys\n"
        "print(json.dumps({'tty': [os.isatty(n) for n in range(3)],\n"
        " 'mask': sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),\n"
        " 'status': [l for l in open('/proc/self/status') if l.startswith(('SigBlk', 'SigIgn'))],\n"
        " 'same_session': os.getsid(0) == os.getsid(os.getppid()),\n"
        " 'same_group': os.getpgrp() == os.getpgid(os.getppid()),\n"
        " 'descriptors': sorted(n for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n))}))\n"
    )
    seen = []
    for command in ([sys.executable, "-c", program], launcher(tmp_path / "run", sys.executable, "-c", program)):
        parent, child = pty.openpty()
        done = subprocess.run(command, stdin=child, stdout=subprocess.PIPE, stderr=child, timeout=60)
        os.close(child)
        os.close(parent)
        seen.append(json.loads(done.stdout))
    assert seen[0]["tty"] == [True, False, True]
    assert seen[1] == seen[0]


def test_environment_gains_the_agent_and_keeps_the_users_path(tmp_path: Path) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    mine = f"{tmp_path}/a{os.pathsep}{tmp_path}/b"
    environ = {**os.environ, "PYTHONPATH": mine, "OMP_NUM_THREADS": "3"}
    environ.pop("_RJEM_MALLOC_CONF", None)  # Polars sets it where it is imported
    done = record(tmp_path / "run", "sh", "-c", f"exec {sys.executable} -c '{program}'", env=environ)
    seen = json.loads(done.stdout)
    first, _, rest = seen["PYTHONPATH"].partition(os.pathsep)
    assert first.endswith("record/agent/bootstrap")
    assert rest == mine
    configuration = json.loads(seen["STEPSCOPE_RECORD"])
    assert configuration["run"] == str(tmp_path / "run")
    assert configuration["host_dir"] == str(host_dir(tmp_path / "run"))
    assert seen["KINETO_LOG_LEVEL"] == "99"
    changed = {"PYTHONPATH", "STEPSCOPE_RECORD", "KINETO_LOG_LEVEL"}
    before = {
        name: value for name, value in environ.items() if name not in changed and name not in ("_", "PWD", "SHLVL")
    }
    assert {name: seen.get(name) for name in before} == before
    assert seen.keys() - environ.keys() <= {*changed, "_", "PWD", "SHLVL"}


def test_a_locale_that_python_puts_in_for_itself_stays_with_it(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "LANG" and not name.startswith("LC_")}
    for environ in (plain, {**plain, "LC_CTYPE": "C.UTF-8"}):
        done = record(tmp_path / f"run{len(environ)}", "sh", "-c", "echo $LC_CTYPE", env=environ)
        assert done.stdout.strip() == environ.get("LC_CTYPE", "").encode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGABRT])
def test_a_signal_sent_to_stepscope_alone_reaches_the_command_once(
    tmp_path: Path, counter: Path, number: signal.Signals
) -> None:
    with started(tmp_path / "run", sys.executable, str(counter), str(tmp_path), "60") as run:
        wait_for((tmp_path / "pid").exists, "the command")
        run.send_signal(number)
        wait_for(lambda: got(tmp_path), "the signal")
        (tmp_path / "leave").touch()
        run.communicate(timeout=60)
    assert got(tmp_path) == [number.name]
    assert run.returncode == (5 if number == signal.SIGTERM else 0)
    assert manifest(tmp_path / "run")["exit"]["shell_status"] == run.returncode


# What an interactive shell does with a job: a group of its own in the foreground, wait until it stops, continue it.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])
_, status = os.waitpid(pid, os.WUNTRACED)
assert os.WIFSTOPPED(status), status
open(sys.argv[1] + "/stopped", "w").close()
while not os.path.exists(sys.argv[1] + "/go-on"):
    pass
os.killpg(pid, signal.SIGCONT)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_an_alarm_set_before_ends_the_command_as_it_would_without_us(tmp_path: Path) -> None:
    """As by `perl -e 'alarm shift; exec @ARGV'`: the kernel keeps it for the program that is started."""
    alarm = "import os, signal, sys; signal.setitimer(signal.ITIMER_REAL, 2.0); os.execv(sys.argv[1], sys.argv[1:])"
    line = [sys.executable, "-c", alarm, *launcher(tmp_path / "run", "sleep", "60")]
    done = subprocess.run(line, capture_output=True, timeout=50)  # nobody holds the pipes any more
    assert done.returncode in (128 + signal.SIGALRM, -signal.SIGALRM)  # before the command was started


def test_ctrl_z_stops_the_whole_job_and_the_shell_can_continue_it(tmp_path: Path, counter: Path) -> None:
    command = launcher(tmp_path / "run", sys.executable, str(counter), str(tmp_path), "60")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SHELL, str(tmp_path), *command])
    child = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command"))
    os.write(terminal, b"\x1a")
    wait_for((tmp_path / "stopped").exists, "the stop")
    wait_for(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the command's stop")
    (tmp_path / "leave").touch()
    (tmp_path / "go-on").touch()
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def test_an_ignored_hangup_stays_ignored(tmp_path: Path, counter: Path) -> None:
    """As under nohup: neither the launcher nor the command ends."""
    command = launcher(tmp_path / "run", sys.executable, str(counter), str(tmp_path), "60")
    run = subprocess.Popen(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command])
    try:
        pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command"))
        run.send_signal(signal.SIGHUP)
        os.kill(pid, signal.SIGHUP)
        time.sleep(0.3)
        assert is_alive(pid)
        assert run.poll() is None
        (tmp_path / "leave").touch()
        assert run.wait(60) == 0
    finally:
        if run.poll() is None:
            run.kill()


def test_max_steps_interrupts_the_command_and_its_children_like_a_terminal(tmp_path: Path, counter: Path) -> None:
    out = tmp_path / "run"
    script = tmp_path / "job.sh"
    # The shell ignores SIGINT only to be there still when its child has been asked.
    script.write_text(f"trap : INT\n{sys.executable} {counter} {tmp_path} 60\necho status $?\n")
    with started(out, "bash", str(script), max_steps=10) as run:
        wait_for((tmp_path / "pid").exists, "the command")
        (host_dir(out) / "max-steps").write_text("{}\n")
        wait_for(lambda: got(tmp_path), "SIGINT")
        time.sleep(0.3)
        (tmp_path / "leave").touch()
        stdout, _ = run.communicate(timeout=60)
    assert got(tmp_path) == ["SIGINT"]
    assert stdout == b"status 0\n"
    assert run.returncode == 0
    assert manifest(out)["options"]["max_steps"] == 10


def test_max_steps_ends_a_command_that_ignores_sigint(tmp_path: Path) -> None:
    """As the shell starts what runs in the background (`script &`)."""
    out = tmp_path / "run"
    script = tmp_path / "job.sh"
    script.write_text(
        f"trap '' INT\ntouch {tmp_path}/started\nexec {sys.executable} -c 'import time; time.sleep(60)'\n"
    )
    with started(out, "bash", str(script), max_steps=10) as run:
        wait_for((tmp_path / "started").exists, "the command")
        (host_dir(out) / "max-steps").write_text("{}\n")
        run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("name", "text", "mode", "status", "words"),
    [
        ("no-such-program-here", None, 0, 127, "command not found"),
        ("./missing.sh", None, 0, 127, "command not found"),
        ("./", None, 0, 126, "is a folder"),
        ("./plain.txt", "hello", 0o644, 126, "not executable"),
        ("./bad.sh", "#!/no/such/interpreter\n", 0o755, 127, "cannot be started"),
    ],
)
def test_a_command_that_cannot_start_gives_a_shells_status_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, mode: int, status: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
        Path(name).chmod(mode)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CommandNotStarted, match=words) as refused:
        launch(RecordOptions(command=(name,)))
    assert refused.value.exit_code == status
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def test_manifest_names_the_run_and_hides_secrets(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("import sys\nprint(len(sys.argv))\n")
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", "-b", "trunk"], check=True)
    subprocess.run([*git, "add", "train.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "2", "MY_API_TOKEN": "s3cret", "SLURM_JOB_ID": ""}
    arguments = ["--wandb-key", "s3cret", "--lr=0.1", "password=s3cret"]
    done = record(tmp_path / "run", sys.executable, "train.py", *arguments, cwd=work, env=environ)
    assert (done.returncode, done.stdout) == (0, b"5\n")  # the command itself got them
    value = manifest(tmp_path / "run")
    assert "s3cret" not in str(value)
    assert value["schema"] == "stepscope.run/1"
    assert value["command"][:3] == [sys.executable, "train.py", "--wandb-key"]
    assert value["script"] == {"kind": "script", "path": str(work / "train.py")}
    assert value["user_roots"] == [str(work)]
    assert value["environment"]["OMP_NUM_THREADS"] == "2"
    assert "MY_API_TOKEN" not in value["environment"]
    assert (value["git"]["root"], value["git"]["branch"], value["git"]["dirty"]) == (str(work), "trunk", False)
    assert len(value["git"]["commit"]) == 40
    assert value["scheduler"] is None
    assert value["started_ns"] < value["ended_ns"]
    assert value["hardware"]["affinity"] == sorted(os.sched_getaffinity(0))
    assert value["sampler"]["source"] in ("py-spy", "agent")
    assert value["page_faults"]["cost"] is None  # measured beside training alone


def test_what_a_fault_costs_is_measured_where_something_trained(tmp_path: Path) -> None:
    rank = "import json, os, pathlib; run = pathlib.Path(json.loads(os.environ['STEPSCOPE_RECORD'])['run']);" + (
        "host = pathlib.Path(json.loads(os.environ['STEPSCOPE_RECORD'])['host_dir']); (run / 'rank-0').mkdir();"
        "(run / 'rank-0' / 'rank.json').write_text(json.dumps({'threads': 1}));"
        "(host / 'agents.jsonl').write_text(json.dumps({'folder': 'rank-0'}) + '\\n')"
    )
    assert record(tmp_path / "trained", sys.executable, "-c", rank, cwd=tmp_path).returncode == 0
    assert manifest(tmp_path / "trained")["page_faults"]["cost"]["threads"] == 1


def test_git_leaves_the_repository_untouched_and_unknowns_are_null(tmp_path: Path) -> None:
    assert git_state(git_root(tmp_path)) is None or git_root(tmp_path) != tmp_path
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    state = git_state(git_root(tmp_path / "deeper" / "still"))
    assert state is not None
    assert (state["root"], state["commit"], state["branch"]) == (str(tmp_path), None, None)
    assert not (tmp_path / ".git/index.lock").exists()


class Command:
    """A run whose journal grows as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signals, self.now = folder, 0, 100.0
        self.limit = StepLimit(folder, lambda: [folder], self.interrupt, lambda: self.now)

    def interrupt(self) -> None:
        self.signals += 1

    def train(self) -> None:
        with (self.folder / "steps.jsonl").open("a") as file:
            file.write("[1]\n")

    def reach(self) -> None:
        (self.folder / MAX_STEPS_MARKER).write_text("{}\n")

    def look_after(self, seconds: float) -> int:
        self.now += seconds
        self.limit.look()
        return self.signals


def test_nothing_before_the_limit_and_once_at_it(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.train()
    assert command.look_after(60) == 0
    assert command.limit.pending
    command.reach()
    assert command.look_after(0.1) == 1
    assert not command.limit.pending


def test_a_command_that_ends_in_its_own_time_is_not_told_again(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.reach()
    command.train()
    assert command.look_after(0) == 1
    command.train()  # the steps that were on their way
    for _ in range(20):
        assert command.look_after(AGAIN_SECONDS) == 1


def test_one_that_trains_on_is_told_again_but_not_for_ever(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.reach()
    assert command.look_after(0) == 1
    counts = []
    for _ in range(4 * MOST):
        command.train()
        counts.append(command.look_after(AGAIN_SECONDS))
    assert counts[0] == 1  # the first look afterwards only sees how far it is
    assert counts[1] == 2
    assert counts[-1] == MOST
