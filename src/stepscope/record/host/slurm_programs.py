"""What programs found in batch scripts do with their arguments: start another program, train, or nothing of interest.

Plain tables. Options are those that take a value as a word of their own; all others are one word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PYTHON = re.compile(r"(?:python|pypy)(?:\d+(?:\.\d+)*)?(?:t|d)?")
SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ksh"))
SHELL_SCRIPT = re.compile(r".+\.(?:sh|bash|sbatch|slurm|job)")


@dataclass(frozen=True)
class Starter:
    """A program that starts the one after its options.

    Attributes:
        values: options followed by one word; `pairs` by two.
        operands: words between the options and the program.
        pins: whether it binds what it starts to processors or lowers its priority; the recorder stays outside then.
    """

    values: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()
    operands: int = 0
    pins: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Starters of the tasks of a job: the recorder belongs behind them, once per task.
TASK_STARTERS = {
    "srun": Starter(
        _words(
            "-A -B -c -C -d -D -e -G -i -J -L -m -M -n -N -o -p -P -q -r -S -t -T -w -W -x --account --acctg- "
            "freq --bcast --begin --cluster-constraint --clusters --comment --constraint --container --cores- "
            "per-socket --cpu-bind --cpu-freq --cpus-per-gpu --cpus-per-task --chdir --dependency "
            "--distribution --epilog --error --exclude --export --extra-node-info --gpu-bind --gpu-freq --gpus "
            "--gpus-per-node --gpus-per-socket --gpus-per-task --gres --gres-flags --het-group --hint --input "
            "--jobid --job-name --licenses --mail-type --mail-user --mcs-label --mem --mem-bind --mem-per-cpu "
            "--mem-per-gpu --mincpus --mpi --msg-timeout --network --nodefile --nodelist --nodes --ntasks "
            "--ntasks-per-core --ntasks-per-gpu --ntasks-per-node --ntasks-per-socket --open-mode --output "
            "--partition --power --prefer --priority --profile --prolog --qos --relative --reservation --signal "
            "--slurmd-debug --sockets-per-node --switches --task-epilog --task-prolog --threads --threads-per- "
            "core --time --time-min --tres-bind --tres-per-task --wait --wckey --x11 --container-image "
            "--container-mounts --container-workdir --container-name --container-save --container-env"
        )
    ),
    "mpirun": Starter(
        _words(
            "-n -np --np -N -c -H -host --host -hosts -hostfile --hostfile -machinefile --machinefile -f -x "
            "-map-by --map-by -bind-to --bind-to -rank-by --rank-by -npernode --npernode -ppn -perhost --ppn "
            "-wdir --wdir -wd --prefix --output-filename --timeout -rf --rankfile -genvlist -envlist -bootstrap "
            "-launcher -iface -outfile-pattern -tune --tune -am --app -path -cpus-per-proc --cpus-per-rank "
            "--report-state-on-timeout"
        ),
        _words("-mca --mca -gmca --gmca -genv -env --prtemca --pmixmca"),
    ),
    "aprun": Starter(_words("-n -N -d -S -j -cc -e -L -a -m -p")),
    "jsrun": Starter(
        _words("-n -a -c -g -r -p -E -D -o -k -b -l -d -s -M --nrs --tasks_per_rs --cpu_per_rs --gpu_per_rs")
    ),
    "ibrun": Starter(_words("-n -np -o")),
}
for _other in ("mpiexec", "mpiexec.hydra", "mpirun_rsh", "orterun", "prun"):
    TASK_STARTERS[_other] = TASK_STARTERS["mpirun"]

# Options of them that take no value, though nothing about them says so.
TASK_FLAGS = _words(
    "--contiguous --disable-status --exact --exclusive --external-launcher --help --hold --immediate --kill-on- "
    "bad-exit --label --nice --no-allocate --no-kill --overcommit --oversubscribe --overlap --preserve-env --pty "
    "--quiet --quit-on-interrupt --reboot --resv-ports --spread-job --unbuffered --use-min-nodes --verbose "
    "--whole --container-mount-home --container-remap-root --container-entrypoint --container-writable "
    "--container-readonly --allow-run-as-root --tag-output --display-map --report-bindings --nooversubscribe "
    "--mpi-preload"
)

STARTERS = {
    "exec": Starter(_words("-a")),
    "command": Starter(),
    "time": Starter(_words("-f -o")),
    "nohup": Starter(),
    "setsid": Starter(),
    "env": Starter(_words("-u --unset -C --chdir")),
    "stdbuf": Starter(_words("-i -o -e")),
    "timeout": Starter(_words("-k -s --kill-after --signal"), operands=1),
    "unbuffer": Starter(),
    "nice": Starter(_words("-n --adjustment"), pins=True),
    "ionice": Starter(_words("-c -n"), pins=True),
    "chrt": Starter(_words("-T -P -D"), operands=1, pins=True),
    "numactl": Starter(
        _words("-i -m -N -C -p --interleave --membind --cpunodebind --physcpubind --preferred"), pins=True
    ),
}
TASKSET_LIST = _words("-c --cpu-list -ac -ca")

CONTAINERS = _words("singularity apptainer")
CONTAINER_OPTIONS = Starter(
    _words(
        "-B --bind -H --home -W --workdir --env --env-file --pwd --cwd -S --scratch --overlay -o --app "
        "--network --network-args --security --hostname --dns --fusemount --mount --apply-cgroups --add-caps "
        "--drop-caps --pem-path --blkio-weight --cpus --memory --oom-kill-disable --pids-limit --shm-size "
        "--authfile"
    )
)
OTHER_CONTAINERS = _words("docker podman podman-hpc nvidia-docker shifter ch-run enroot udocker sarus")
# Started with `run`, they find the interpreter; the recorder reaches what they start.
RUNNERS = _words("uv poetry pipenv pixi rye pdm hatch conda mamba micromamba")

# Programs that train, with the words that must come first; an empty tuple takes any.
TRAINERS: dict[str, tuple[str, ...]] = {
    "torchrun": (),
    "deepspeed": (),
    "horovodrun": (),
    "accelerate": ("launch",),
    "composer": (),
    "fairseq-train": (),
    "fairseq-hydra-train": (),
    "colossalai": ("run",),
    "lightning": ("run", "fit"),
    "fabric": ("run",),
    "tune": ("run",),
    "litgpt": (),
    "llamafactory-cli": ("train",),
    "axolotl": ("train",),
}
NO_TRAINING_MODULES = _words(
    "pip venv virtualenv ensurepip compileall py_compile http.server zipfile tarfile json.tool site sysconfig "
    "platform torch.utils.collect_env ipykernel jupyter notebook tensorboard tensorboard.main build pytest "
    "unittest"
)
PROFILERS = _words(
    "nsys ncu nvprof py-spy scalene viztracer memray austin rocprof rocprofv2 rocprofv3 rocprof-sys-run vtune "
    "perf strace ltrace kernprof pyinstrument"
)
PROFILER_MODULES = _words("cProfile profile scalene viztracer memray torch.utils.bottleneck kernprof pyinstrument")
# What scripts also do, with names of Python files in it or not.
HARMLESS = _words(
    "echo printf export declare typeset local readonly unset set shopt module ml source . which type cp mv rm "
    "mkdir rmdir cat ls cd pushd popd tar unzip zip rsync scp sftp git pip pip3 wget curl head tail grep sed "
    "awk tee ln chmod chown touch test [ [[ for case select function trap alias sbatch salloc scancel squeue "
    "scontrol sacct sleep wait kill date hostname nvidia-smi rocm-smi find true false : return exit read done "
    "fi esac } break continue shift ulimit umask df du free lscpu lsof ps top nproc getconf realpath readlink "
    "dirname basename sort uniq wc diff sha256sum md5sum mktemp seq hash bc jq envsubst sync vim nano less more "
    "file stat"
)
MENTION = re.compile(
    r"\.py(?![\w.])|(?<![\w.-])(?:torchrun|deepspeed|horovodrun|accelerate launch|python[\d.]*)(?![\w.-])"
)


def reads_programs(base: str) -> bool:
    """Whether a program of this name runs what it reads from its input."""
    return base in SHELLS or PYTHON.fullmatch(base) is not None
