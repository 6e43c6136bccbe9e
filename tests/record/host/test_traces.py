"""Window traces are compressed after the run, those of our own host only."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from stepscope.record.host.folder import compress_traces, own_rank_folders


def test_own_traces_are_compressed_and_others_left_alone(tmp_path: Path) -> None:
    host = tmp_path / "host-a"
    host.mkdir()
    for name in ("rank-0", "rank-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace-0.pt.trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "rank-0/steps.jsonl").write_text("x")
    claims = [{"pid": 1, "folder": "rank-0"}, {"pid": 2, "folder": "../elsewhere"}, {"pid": 3}]
    (host / "agents.jsonl").write_text("".join(json.dumps(claim) + "\n" for claim in claims) + '{"torn')
    folders = own_rank_folders(tmp_path, host)
    assert folders == [tmp_path / "rank-0"]
    compress_traces(folders)
    assert sorted(path.name for path in (tmp_path / "rank-0").iterdir()) == ["steps.jsonl", "trace-0.pt.trace.json.gz"]
    assert gzip.decompress((tmp_path / "rank-0/trace-0.pt.trace.json.gz").read_bytes()) == b'{"traceEvents": []}'
    assert (tmp_path / "rank-1/trace-0.pt.trace.json").exists()
