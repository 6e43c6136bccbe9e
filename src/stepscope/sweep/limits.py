"""Every limit by which a sweep is judged, each with its reason.

Chosen by simulation: quadratics in two parameters beside an inert third, of equal or a quarter's weight, with and
without noise, 12 to 60 trials, 20 seeds each (tests/sweep/test_importance.py keeps the main case).
"""

from __future__ import annotations

TRIALS_PER_PARAMETER = 4  # finished ones; with fewer the inert parameter came last in half of the seeds only
# PED-ANOVA compares the best tenth of the trials with all of them, and asks for five in that tenth. With 24 trials it
# put the inert parameter last in 15 to 19 of 20 seeds, the surface in 19 or 20; from 50 on both do.
PED_ANOVA_TRIALS = 50
TERMS_SHARE = 0.5  # of the trials: a surface with more terms follows chance, so products of pairs are left out
RIDGE = 0.02  # of the number of trials; samplers crowd around the optimum, where line and curve look alike
FAR_OUT = 3.0  # interquartile ranges beyond the quartiles (Tukey's far out): one that diverged must not decide alone
RESAMPLES = 200  # of the trials, and of an inert parameter's values; ends of intervals move by a few percent
CONFIDENCE = 0.95
INERT = 0.95  # of the shares that values dealt out anew get; an inert parameter passes once in twenty sweeps
LEAST_SHARE = 0.05  # a parameter or a pair that decides less is not worth a trial, however certain it is
CONTOUR_CELLS = 24  # along a side of the map of the first pair: a surface of second degree has no finer detail
