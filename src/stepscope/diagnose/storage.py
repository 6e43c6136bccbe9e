"""What reading from storage says of a slow loader: evidence and advice for the rules that state what the wait costs.

Storage makes no finding of its own: how much of a wait is the disk's cannot be told apart from the decoding around it.
"""

from __future__ import annotations

from stepscope.diagnose.thresholds import STORAGE
from stepscope.model import Analysis, Evidence
from stepscope.model.machine import StorageFacts

# Kinds of file systems whose data lies on other machines, as the kernel calls them.
NETWORK = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "afs", "panfs", "wekafs")
)
_FUSE = "fuse"  # fuse.sshfs, fuse.s3fs, fuse.juicefs: a program answers, mostly over a network


def storage_evidence(analysis: Analysis) -> tuple[Evidence, ...]:
    """Where the data lies and whether reading it reaches a device; nothing without telemetry or noteworthy reads."""
    facts = _facts(analysis)
    if facts is None or not _reads(facts):
        return ()
    who = "loader workers" if facts.role == "loader_worker" else "the training process"
    source = f"system.jsonl, {who}"
    found = []
    if facts.mounts:
        top = facts.mounts[0]
        name = f"{top.kind} at {top.path}"
        found.append(Evidence("file system of the data", name, "", f"system.jsonl, {top.source}"))
    rates = (("read", facts.requested_bytes_per_s), ("read from the device", facts.device_bytes_per_s))
    found += [Evidence(name, round(rate / 1e6, 2), "MB/s", source) for name, rate in rates if rate is not None]
    if facts.cold_share is not None:
        found.append(Evidence("of it not in the page cache", round(facts.cold_share, 4), "fraction", source))
    if facts.blocked_share is not None and facts.blocked_readings >= STORAGE.readings:
        text = f"{source}, state in {facts.blocked_readings} readings"
        found.append(Evidence("blocked for a disk or network storage", round(facts.blocked_share, 4), "fraction", text))
    if facts.io_delay_share is not None:
        found.append(Evidence("waiting for a block device", round(facts.io_delay_share, 4), "fraction", source))
    if (facts.major_faults_per_s or 0.0) >= STORAGE.faults_per_s:
        found.append(Evidence("mapped pages read from a disk", round(facts.major_faults_per_s or 0, 1), "1/s", source))
    return tuple(found)


def storage_advice(analysis: Analysis) -> str:
    """What to do about it, a sentence to add to a fix; empty where reads do not reach a slow device."""
    facts = _facts(analysis)
    if facts is None or not _reads(facts):
        return ""
    cold = (facts.cold_share or 0.0) >= STORAGE.cold
    far = next((mount for mount in facts.mounts if is_network(mount.kind)), None)
    if cold and facts.late_cold_share is not None and facts.late_cold_share < STORAGE.warm:
        return (
            ". The first pass read the device, later ones come from the page cache: measure those, or read the files "
            "once before training"
        )
    if far is not None:
        return (
            f". The data lies on {far.kind} at {far.path}: copy it to node-local storage before training "
            "($SLURM_TMPDIR, $TMPDIR), as a few large files that are read in order rather than many small ones"
        )
    if cold:
        return (
            ". Reads reach the device: pack small files into a few large ones that are read in order, or keep the data "
            "on faster storage or, where it fits, in memory"
        )
    return ""


def is_network(kind: str) -> bool:
    """Whether a file system of that kind mostly keeps its data on other machines."""
    return kind in NETWORK or kind == _FUSE or kind.startswith(f"{_FUSE}.")


def _facts(analysis: Analysis) -> StorageFacts | None:
    return analysis.machine.storage if analysis.machine is not None else None


def _reads(facts: StorageFacts) -> bool:
    """Whether there is anything to say: bytes that matter, or mapped pages that a disk had to bring."""
    rate = max(facts.requested_bytes_per_s or 0.0, facts.device_bytes_per_s or 0.0)
    return rate >= STORAGE.bytes_per_s or (facts.major_faults_per_s or 0.0) >= STORAGE.faults_per_s
