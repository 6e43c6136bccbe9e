"""What a verdict over many ranks decides by, each number with its reason."""

from __future__ import annotations

MIN_STEPS = 20  # steady or windowed ones: of fewer, quarters of a run cannot agree
MIN_WINDOWED = 8  # steps of windows: of fewer, chance decides which stage or batch is longest
MIN_RANKS = 2
MIN_PEERS = 3  # of which the middle one tells a wait of all from what one does
MISSING_SHARE = 0.25  # of the places in the layout: with more of them not recorded, "none" would be a guess
MAX_CELLS = 24_000_000  # ranks x steps that are held at once, 100 MB a column; beyond, blocks spread over the run
MAX_PLAYED = 4_000_000  # rows of work that pipelines are played again from: steps spread over the run, some 200 MB

# Holmes (NSDI'25) loses its signal below 1.04 x; jobs without a straggler differ by some percent between ranks.
LEAST_SHARE = 0.04  # of the mean step: what a rank, host, stage, link or rotating cause must cost to be named
LEAST_STEADY_SHARE = 0.02  # the same of a rank that is late in nearly every step
STEADY_LATE = 0.8  # part of the steps, for that
SIGMAS = 6.0  # robust deviations over the ranks: a thousand ranks make 4 by chance, tails of real ones more
STEADY_SIGMAS = 8.0  # for the smaller effect
ERRORS = 4.0  # standard errors over time, by blocks of steps
BLOCKS = 40  # parts of a run whose means are compared
SPIKE_BLOCKS = 2  # of them, those with the largest excess count for nothing: one stall is no straggler
FLOOR_SHARE = 0.002  # of the step, below which differences between ranks are no measure of what is usual

HOST_SHARE = 0.75  # of a host's ranks that must be late, by at least
HOST_PART = 0.5  # of what its latest is
SAME_HOST_SPREAD = 2.0  # the latest of a host's ranks at most so much later than its middle one

# A rank's spike stands out of the noise of a thousand: 4 deviations by chance, 8 never.
SPIKE_SIGMAS = 8.0
MIN_SPIKES = 5  # of one rank, in most of the steps in which any has one: chance makes none twice
ROTATING_STEPS = 0.1  # part of the steps in which some rank must spike
ROTATING_RANKS = 3  # different ones, none with more than ...
ROTATING_WORK = 0.06  # of the step, that is lost to work of unknown kind: noise of a thousand ranks alone makes 3
ROTATING_MOST = 0.2  # of the steps in which one rank may be last for it
ROTATING_ONE = 0.5  # ... of the spikes: else it is that rank's own
TOKENS_SPREAD = 0.03  # mean over steps of largest over mean tokens, less 1: less does not lengthen a step notably
TOKENS_FIT = 0.5  # part of the variance of the work between ranks that tokens must explain

STAGE_SHARE = 0.05  # a stage's own work beyond the mean of the others
GLOBAL_RATIO = 1.15  # a step so much longer than the median step is one in which something happened to all
GLOBAL_OWN = 0.5  # at most this part of the extra time may be one rank's own work
GLOBAL_EVENTS = 3  # times it must have happened

LINK_RATIO = 1.5  # a group's transfers against those of groups alike
LINK_PART = 0.01  # of the step that calls of one kind must take longer; of all kinds together it is LEAST_SHARE
LINK_GROUPS = 3  # alike, the slow one among them: of two, none can be told to be the usual one
MIN_LINK_STEPS = 5  # with calls of the group: a retransmission now and then is no slow link

# What is lost in steps of windows, carried over to the run by how long its steps are
SHORTEST = 0.1  # quantile of the steps' lengths: nobody is late in such steps
LENGTHENS_MOST = 1.5  # times the largest loss: what makes a step longer than that is something else
SEEN_LENGTH = 1.25  # times the longest of windows: nothing is known of steps beyond
HIDDEN = 0.25  # of what a rank does longer must show in its arrivals, or the device's queue hides it
MOST_BY_PASSES = 2.0  # by what a step's longest rank is late, where another may be the last in each of its passes

PART_OF_EXCESS = 0.5  # that a component must explain to be the cause
LINE_PART = 0.25  # of the excess that a line must explain to be named
SHARE_ERRORS = 4.0  # standard errors of a line's share: the largest of some hundred lines reaches 3 by chance
MIN_SAMPLES = 50  # of a rank's stacks: with fewer, chance alone moves a share of a fifth by a quarter of it
CLOCK_DROP = 0.04  # of the peers' clock: less is what devices of one kind differ by
BUSY_CORES = 0.2  # more of the host's processors in use than on other hosts

MAX_STRAGGLERS = 16
MAX_SUSPECTS = 20
