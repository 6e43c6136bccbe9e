"""Definitions of the figures of replays."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "ceilings of findings on devices and of the loader in traces"

SECTIONS = (
    Section(
        "Replay",
        "Devices: profiled steps played again",
        _WHERE,
        metrics(
            steps=(
                "count",
                "Interior steps: all but a trace's first and last, or all where there are fewer than three.",
            ),
            recorded_mean_ns=("ns", "Their mean wall time, cut as in the overview."),
            recorded_median_ns=("ns", "The median step's."),
            unchanged_mean_ns=("ns", "The mean step of a replay without any change."),
            unchanged_median_ns=("ns", "The median step's."),
            never_late_mean_ns=("ns", "The mean step of a replay with a host that prepares launches in no time."),
            never_late_median_ns=("ns", "The median step's."),
            residual=("share", "How far recorded and unchanged steps lie apart, summed, of the recorded ones."),
            unexplained_ns=(
                "ns",
                "In a mean step: no device does anything although a slice was launched and its stream free, for more than 20 us.",
            ),
        ),
    ),
    Section(
        "WhatIf",
        "Devices: profiled steps without one loss",
        _WHERE,
        metrics(
            mean_ns=("ns", "The mean interior step of a replay without the loss."),
            median_ns=("ns", "The median step's."),
            never_late_mean_ns=(
                "ns",
                "Where the loss is work of the device: the mean step without it, with a host that prepares launches in no time.",
            ),
            never_late_median_ns=("ns", "The median step's."),
        ),
    ),
)
