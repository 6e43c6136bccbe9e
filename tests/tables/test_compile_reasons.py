"""Messages of compilers. `messages.jsonl` holds texts that torch 2.6, 2.9 and 2.13 wrote, one per case and version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.tables.compile_reasons import (
    CAUSES,
    is_limit_hit,
    parse_graph_break,
    parse_recompile,
    xla_cause,
)

DATA = Path(__file__).resolve().parents[1] / "data" / "compiles"
MESSAGES = [json.loads(line) for line in (DATA / "messages.jsonl").read_text("utf-8").splitlines()]
CASES = "/home/user/train/cases.py"  # 2.9 shortens it to "ome/user/train/cases.py"
LIBRARY = object()  # the code that checks the value is torch's own, so no line of the user's is named
ANY = object()

# case -> (cause, subject, old, new, line) of the first reason; versions that differ are listed below
RECOMPILES: dict[str, tuple[Any, ...]] = {
    "shape": ("shape", "x.size(0)", "8", "12", None),
    "dynamic_shape": ("shape", "x.size(0)", "8", "12", None),
    "dyn_constraint": ("shape", "x.size(0)", ">= 11", None, 30),
    "dyn_two": ("shape", "x.size(0)", "2*y.size(0)", None, 36),
    "div": ("shape", "x.size(0)", "(x.size(0) % 3) == 0", None, 42),
    "stride": ("stride", "x.stride(0)", "4", "1", None),
    "dtype": ("dtype", "x", "Float", "Double", None),
    "rank": ("shape", "x.dim()", "1", "2", None),
    "reqgrad": ("requires_grad", "x", "False", "True", None),
    "reqgrad_param": ("requires_grad", "fn.weight", "True", "False", None),
    "device": ("device", "x", "CPU", "Meta", None),
    "subclass": ("type", "x", "Tensor", "__main__.subclass.<locals>.T", None),
    "param": ("type", "x", "Tensor", "torch.nn.parameter.Parameter", None),
    "floatarg": ("float_argument", "scale", "1.0", None, 72),
    "nanarg": ("float_argument", "scale", "nan", None, 76),
    "intarg": ("constant", "n", "3", None, 80),
    "strarg": ("constant", "mode", "'a'", None, 84),
    "boolarg": ("constant", "flag", "True", None, 90),
    "nonearg": ("type", "y", "None", None, 94),
    "nonearg2": ("type", "y", "Tensor", "NoneType", None),
    "typearg": ("constant", "y", "3", None, 102),
    "lst": ("length", "xs", "1", None, 106),
    "emptylst": ("length", "xs", "0", None, 110),
    "dct": ("keys", "b", "without 'y'", "with 'y'", 114),
    "dctkeys": ("keys", "b", "'z'", None, 120),
    "dctval": ("float_argument", "b['lr']", "0.1", None, 125),
    "setarg": ("keys", "s", "with 3", "without 3", 129),
    "intattr": ("int_attribute", "s.calls", "0", None, 136),
    "obj_attr": ("int_attribute", "s.n", "1", None, 144),
    "train_eval": ("attribute", "fn.1.training", "True", None, LIBRARY),
    "grad_mode": ("grad_mode", "grad_mode", None, None, None),
    "threads": ("global_state", "num_threads", None, None, None),
    "autocast": ("global_state", ANY, ANY, ANY, None),
    "determ": ("global_state", "deterministic_algorithms", None, None, None),
    "default_dtype": ("global_state", "default_dtype", None, None, None),
    "default_device": ("global_state", ANY, ANY, None, None),
    "inference_mode": ("grad_mode", "grad_mode", None, None, None),
    "tf_mode": ("global_state", None, None, None, None),
    "fn_object": ("new_function", "fn", None, None, 182),
    "closure": ("float_argument", "k[0]", "1.0", None, 193),
    "globals": ("constant", "GLOB", "1.5", None, 199),
    "defaults": ("constant", "k", "3", None, 203),
    "hasattr2": ("attribute", ANY, None, None, None),
    "modattr": ("attribute", "m.foo", None, None, 220),
    "module_obj": ("type", "m", ANY, None, 224),
    "alias": ("object", "x, y", None, None, None),
    "alias2": ("object", "x, y", None, None, 234),
    "rng": ("constant", "r.stop", "2", None, 237),
    "it": ("length", "r", "2", None, 242),
    "enum": ("object", "e", ANY, None, 249),
    "optim": ("attribute", "self.param_groups[0]['lr']", "0.1", None, LIBRARY),
    "optim_adam": ("attribute", "self.param_groups[0]['lr']", "0.1", None, LIBRARY),
    "item": ("tensor_read", None, "1.0", None, 269),
    "item_branch": ("tensor_read", None, "4.0", None, 275),
    "tolist": ("tensor_read", None, "1.0", None, 338),
}
# what 2.6 says differently: it checks more by identity and length, and gives plain values no line
OLD_RECOMPILES = {
    "boolarg": ("object", "flag", None, None, None),
    "nonearg": ("object", "y", None, None, None),
    "dct": ("length", "b", "1", None, None),
    "setarg": ("constant", "s", "{3}", None, None),
    "rng": ("length", "r", "2", None, None),
    "train_eval": ("attribute", "fn.1.training", None, None, None),
}
WITH_LINE_IN_OLD = ("dyn_constraint", "dyn_two", "div")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{row['torch']}-{row['case']}") for row in MESSAGES if row["kind"] == "recompile"],
)
def test_recompiles_of_every_version(row: dict[str, str]):
    old = row["torch"] == "2.6"
    expected = OLD_RECOMPILES.get(row["case"]) if old else None
    cause, subject, before, after, line = expected or RECOMPILES[row["case"]]
    if line is LIBRARY or (old and row["case"] not in WITH_LINE_IN_OLD):
        line = None
    found = parse_recompile(row["text"], [CASES])
    got = (found.cause, found.subject, found.old, found.new, found.line)
    for value, wanted in zip(got, (cause, subject, before, after, line), strict=True):
        assert wanted is ANY or value == wanted, got
    assert found.file == (CASES if line else None)
    assert found.version is not None


def test_every_case_is_there():
    assert set(RECOMPILES) <= {row["case"] for row in MESSAGES if row["kind"] == "recompile"}


class TestHints:
    def test_a_closure_variable_is_the_subject(self):
        text = (
            "0/0: fn.__closure__[0].cell_contents.scale == 2.0  # return x * c.scale  # m/t.py:9 in inner "
            '(HINT: guard on "c".scale)'
        )
        assert parse_recompile(text).subject == "c.scale"


class TestGuards:
    @pytest.mark.parametrize(
        ("guard", "expected"),
        [
            ("Ne(L['x'].size()[0], 8)", ("shape", "x.size(0)", "not 8", "8")),
            ("8 <= L['x'].size()[0]", ("shape", "x.size(0)", ">= 8", None)),
            ("L['x'].size()[1] == 4", ("shape", "x.size(1)", "4", None)),
            ("x.stride()[0] == 4", ("stride", "x.stride(0)", "4", None)),
            (
                "tensor 'x' Tensor device index mismatch. Expected device index to be 0, actual 1",
                ("device", "x", "0", "1"),
            ),
            (
                "tensor 'm._modules['a']._parameters['w']' rank mismatch. expected 1, actual 2",
                ("shape", "m.a.w.dim()", "1", "2"),
            ),
            ("L['self'].training == True", ("attribute", "self.training", "True", None)),
            ("L['self']._modules['drop'].p == 0.5", ("attribute", "self.drop.p", "0.5", None)),
            ("lr == 1e-05", ("float_argument", "lr", "1e-05", None)),
            ("n == -3", ("constant", "n", "-3", None)),
            ("2 <= n", ("constant", "n", ">= 2", None)),
            ("d['a.b'] == 3", ("constant", "d['a.b']", "3", None)),
            ("mode == 'a == b  # c'", ("constant", "mode", "'a == b # c'", None)),
            ("___dict_contains('w', L['m'].__dict__)", ("attribute", "m.w", None, None)),
            ("___check_obj_id(fn, 140), type=<class 'function'>", ("new_function", "fn", None, None)),
            ("___check_obj_id(L['cfg'], 140)", ("object", "cfg", None, None)),
            ("len(L['xs']) == 3", ("length", "xs", "3", None)),
            ("len(b) != 1", ("length", "b", None, "1")),
            ("KeyError on L['b']['y']", ("keys", "b['y']", None, None)),
            ("list(b.keys()) == ['a', 'c']", ("keys", "b", "['a', 'c']", None)),
            ("GLOBAL_STATE changed: grad_mode autocast ", ("global_state", "grad_mode, autocast", None, None)),
            ("torch.is_grad_enabled() == True", ("grad_mode", None, None, None)),
            (
                "torch.autograd.forward_ad._current_level == -1",
                ("global_state", "torch.autograd.forward_ad._current_level", None, None),
            ),
            ("utils_device.CURRENT_DEVICE == None", ("global_state", "default device", "None", None)),
            ("Cache line invalidated because L['m'] got deallocated", ("object", "m", None, None)),
            (
                "BACKEND_MATCH failure: torch.compile detected different backend callables.",
                ("new_function", "backend", None, None),
            ),
            (
                "_dynamo_static_indices should be absent but is present on runtime tensor",
                ("attribute", None, None, None),
            ),
            ("Unable to find recompilation reasons", (None, None, None, None)),
            ("quantum state of L['x'] collapsed", ("unknown", None, None, None)),
        ],
    )
    def test_known_forms(self, guard: str, expected: tuple[str | None, ...]):
        found = parse_recompile(f"0/0: {guard}")
        assert (found.cause, found.subject, found.old, found.new) == expected


class TestPaths:
    def test_torchs_own_files_are_nobodys_line(self):
        found = parse_recompile("0/0: self.lr == 0.1  # for g in x:  # optim/sgd.py:118 in step", ["/home/u/train.py"])
        assert (found.file, found.line) == (None, None)

    def test_a_library_is_named_only_without_users_code(self):
        library = '  File "/env/lib/python3.11/site-packages/transformers/m.py", line 3, in call\n    y'
        own = '  File "/home/u/train.py", line 9, in step\n    z\n'
        text = "0/0: n == 3  # y  # m.py:3 in call\nUser stack trace:\n"
        assert parse_recompile(text + own + library).line == 9
        assert parse_recompile(text + library).line == 3


class TestLimits:
    def test_by_structure_whatever_the_wording(self):
        event = {"graph": "2/8", "recompile_reason": "2/7: s.calls == 7", "guarded": None, "is_forward": None}
        assert is_limit_hit({**event, "fail_type": "SomethingNew", "fail_reason": "no more versions, please"})
        assert not is_limit_hit({**event, "guarded": True, "is_forward": True})
        assert not is_limit_hit({**event, "guarded": False, "is_forward": True, "fail_type": "Unsupported"})

    @pytest.mark.parametrize(
        "words",
        [
            {"fail_type": "RecompileLimitExceeded", "fail_reason": "cache_size_limit reached"},  # 2.6
            {"fail_type": "RecompileLimitExceeded", "fail_reason": "recompile_limit reached"},  # 2.9
            {"fail_type": "Unsupported", "fail_reason": "Dynamo recompile limit exceeded\n  Explanation: ..."},  # 2.13
            {"fail_type": "FailOnRecompileLimitHit", "fail_reason": "accumulated_recompile_limit reached"},
        ],
    )
    def test_by_wording_where_the_structure_is_missing(self, words: dict[str, str]):
        assert is_limit_hit({"graph": "3/8", **words})


class TestXla:
    @pytest.mark.parametrize(
        ("text", "cause"),
        [
            ("user torch_xla.sync", "user_sync"),
            ("user mark_step", "user_sync"),
            ("torch_xla.sync in parallel loader at step end", "loader_sync"),
            ("torch_xla.sync when exiting a profiler StepTrace region", "user_sync"),
            ("torch_xla.compile", "user_sync"),
            ("torch_xla.sync when dynamo processing input graphs", "dynamo"),
            ("dynamo is compiling a FX graph to HLO", "dynamo"),
            ("most likely user code trying to access tensor value before torch_xla.sync", "read_value"),
            ("the moon is full", "unknown"),
            (None, None),
        ],
    )
    def test_causes(self, text: str | None, cause: str | None):
        assert xla_cause(text) == cause


MARKS = (
    "L['", "']", "  # ", "(HINT: ", "\n", "tensor '", "' size mismatch at index ", "User stack trace:", 'File "',
    "Graph break in user code at ", "Reason:", "not ", "(" * 50, "0/0: ", " == ", "\ud800",
)  # fmt: skip
PIECES = st.sampled_from([*(row["text"] for row in MESSAGES[::17]), *MARKS])
TEXTS = st.one_of(st.text(max_size=300), st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=12).map("".join))


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_nothing_raises_and_causes_are_words(text: str):
    found = parse_recompile(text, ["/home/u/train.py"])
    assert found.cause is None or found.cause in CAUSES
    assert parse_graph_break(text).cause in CAUSES
    for value in (found.subject, found.old, found.new):
        assert value is None or 0 < len(value) <= 200
    assert xla_cause(text) is None or xla_cause(text) in CAUSES


@pytest.mark.parametrize(
    "piece",
    ["a", "(", "'", "L['", 'File "', "tensor '", "0/0: ", "  # ", "x.size()[0]", "Graph break in user code at ", "\n"],
)
def test_megabytes_of_anything_are_cut(piece: str):
    text = piece * (3_000_000 // len(piece))
    assert len(parse_recompile(text).subject or "") <= 200
    assert len(parse_graph_break(text).reason or "") <= 2_000
    assert not is_limit_hit({"graph": "0/0", "fail_reason": text})
