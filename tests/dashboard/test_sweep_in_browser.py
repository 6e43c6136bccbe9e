"""A sweep on its page: lines that a range leaves, what is said of it, hostile names, accessible."""

from __future__ import annotations

from collections.abc import Callable

from stepscope.dashboard.blocks import Alone
from stepscope.dashboard.pages import document, sweeps
from stepscope.model.sweep import (
    FAILED,
    FINISHED,
    Contour,
    Importance,
    Objective,
    Pair,
    Parameter,
    ParameterImportance,
    Sweep,
)
from stepscope.model.sweep import Trial as Made
from stepscope.report import sweep_report
from tests.dashboard.browser import View
from tests.dashboard.opened import check

EVIL = "</script><script>alert(1)</script>"
LR, KIND = "arg:--lr", "arg:--kind"


def sweep() -> Sweep:
    trials = [
        Made(
            number=at,
            state=FINISHED,
            params={LR: 10.0 ** (-5 + at / 2), KIND: ("a", EVIL)[at % 2]},
            value=float((at - 4) ** 2),
            values=(float((at - 4) ** 2), 10.0 - at),
            mean_ms=1.5,
        )
        for at in range(9)
    ]
    trials.append(Made(number=9, state=FAILED, params={LR: 1e-3, KIND: "a"}, reason=f"loss is nan: {EVIL}"))
    rows = (ParameterImportance(LR, 0.9, 0.7, 0.95, 0.1, 0.2), ParameterImportance(KIND, 0.05, 0.0, 0.4))
    axis = tuple(10.0**at for at in (-5, -4, -3, -2, -1))
    height = tuple(tuple(abs(at - 2.0) + row for at in range(5)) for row in range(2))
    contour = Contour(LR, KIND, axis, ("a", EVIL), height, 0.9)
    return Sweep(
        key="0" * 16,
        command=("python", "train.py"),
        cwd="/somewhere",
        params=(Parameter(LR, 1e-5, 1e-1, log=True), Parameter(KIND, choices=("a", EVIL))),
        objectives=(Objective("loss"), Objective("seconds")),
        sampler="tpe",
        seed=0,
        asked=10,
        trials=tuple(trials),
        best=4,
        front=(4, 8),
        importances=(
            Importance(
                metric="loss",
                trials=9,
                method="surface",
                rows=rows,
                important=(LR,),
                pairs=(Pair(LR, KIND, 0.1),),
                contour=contour,
            ),
            Importance(metric="seconds", trials=9, note="nothing to rank: seconds is the same"),
        ),
    )


def test_a_range_on_an_axis_leaves_the_lines_that_pass_through_it(show_made_up: Callable[..., View]) -> None:
    shown = list(sweeps.build(Alone(), sweep_report.sweep_document(sweep())))
    check(document("compare", shown))
    view = show_made_up("compare", shown, axe=True).ready()
    picture = view.page.locator("section.parallel")
    kept = picture.locator("path.kept")
    view.until(lambda: kept.count() == 9)  # the failed one has no line
    assert str(picture.locator(".label").first.text_content()).startswith(LR)
    grip = picture.locator("rect[data-axis='0']")
    grip.scroll_into_view_if_needed()
    box = grip.bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2

    def drag(start: float, end: float) -> None:
        view.page.mouse.move(middle, box["y"] + start * box["height"])
        view.page.mouse.down()
        view.page.mouse.move(middle, box["y"] + end * box["height"], steps=4)
        view.page.mouse.up()

    drag(0.45, 1.05)  # the lower half: learning rates below the middle one
    view.until(lambda: kept.count() == 5)
    assert "5 of 9 shown" in picture.inner_text()
    assert view.violations() == []
    drag(0.5, 0.5)  # a click takes the range away
    view.until(lambda: kept.count() == 9)
    drag(0.1, -0.05)
    view.until(lambda: kept.count() == 1)
    picture.get_by_role("button", name="Show all").click()
    view.until(lambda: kept.count() == 9)
    text = view.page.locator("main").inner_text()
    for part in (
        "Best by loss: trial 5",
        "2 trials on the front",
        "What decides loss: lr.",
        "nothing to rank",
        EVIL,
    ):
        assert part in text
    assert view.page.locator("section.chart").count() == 3  # two slices and the contour
