"""Where steps are cut and what their phases hold, for every kind of loop: a fake clock, no torch.

A scenario is a title, what happens, and the rows after the arrow. A word that happens may have a number (of a loader,
an optimizer, a module, a line) and milliseconds after a colon; `3( ... )` does it three times, and `for1x3( ... )` is a
loop over three batches of loader 1. A row is `T` (training) or `E` (evaluation), its milliseconds as the sum of data
wait, forward, backward, optimizer and other (`-` where unknown), then fetches x samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby

import pytest

from stepscope.record.agent.segments import StepRow

from .loops import Loop, phases

SCENARIOS = """
a plain loop over a loader
    2( for1x3( train wait:1.5 ) wait:500 )
    -> 6*T11.5=2+3+4+1+1.5 1x8
micro batches left over at the end of an epoch are no step
    2( iter1 3( fetch1 fwd bwd ) fetch1 train fetch1 fwd bwd stop1 wait:100 )
    -> 2*T37=8+12+16+1+0 4x32
an update after the loop belongs to the step the loop ended in
    2( for1x3( fwd bwd ) opt )
    -> 2*T28=6+9+12+1+0 3x24
an overflow does not merge two iterations
    iter1 fetch1 train 2( fetch1 fwd bwd skipped ) fetch1 train stop1
    -> T10=2+3+4+1+0 1x8, 2*T9=2+3+4+0+0 1x8, T10=2+3+4+1+0 1x8
a hand written update is cut by the fetch [no optimizer]
    for1x3( fwd bwd wait:2 )
    -> 3*T11=2+3+4+0+2 1x8
an optimizer inside backward is a phase and the boundary stays the fetch
    for1x3( fwd bwd_begin 2( wait:2 opt600 ) bwd_end )
    -> 3*T11=2+3+4+2+0 1x8
an optimizer inside backward without a loader
    5( wait:2 fwd bwd_begin opt600 opt601 bwd_end )
    -> T5=-+3+0+2+0 0x-, T7=-+-+0+2+5 0x-, 3*T7=2+3+0+2+0 0x-
two optimizers and two loaders are one step
    iter1 iter2 4( fetch1 train500 fetch2:5 train501 ) stop1
    -> 4*T23=7+6+8+2+0 1x8
two optimizers without a loader are one step
    6( wait:2 train500 train501 )
    -> T16=-+6+8+2+0 0x-, T18=-+-+8+2+8 0x-, 4*T18=2+6+8+2+0 0x-
an optimizer that joins in every other time is of the step of the one that leads
    4( 2( train500 ) train501 )
    -> T8=-+3+4+1+0 0x-, T8=-+-+4+1+3 0x-, 2*T16=0+6+8+2+0 0x-, T8=0+3+4+1+0 0x-, T16=0+6+8+2+0 0x-,
       T8=0+3+4+1+0 0x-, T16=0+6+8+2+0 0x-
models without a loader that are trained one after the other
    3( train500 ) 3( train501 )
    -> T8=-+3+4+1+0 0x-, T8=-+-+4+1+3 0x-, 4*T8=0+3+4+1+0 0x-
batches that a thread fetches for another one are no steps [both]
    iter1 3( fetch1 ) handed 4( bwd opt )
    -> 3*T5=-+-+4+1+0 0x-
no loader data wait is the gap before the first module
    4( wait:7 train wait:0.5 )
    -> T8=-+3+4+1+0 0x-, T15.5=-+-+4+1+10.5 0x-, 2*T15.5=7.5+3+4+1+0 0x-
no loader and no module seen leaves data wait unknown
    4( wait:7 bwd opt )
    -> 3*T12=-+-+4+1+7 0x-
lbfgs backward inside the optimizer is one step
    for1x3( opt_begin 3( fwd bwd ) opt_end )
    -> 3*T23=2+0+12+9+0 1x8
nested optimizer steps count once
    5( wait:2 fwd bwd opt_begin700 opt opt_end700 )
    -> T8=-+3+4+1+0 0x-, T10=-+-+4+1+5 0x-, 3*T10=2+3+4+1+0 0x-
inference only
    for1x3( fwd wait:1 )
    -> 3*E6=2+4+0+0+0 1x8
leaving the loop by break ends the step there
    iter1 2( fetch1 train ) dead1 wait:1000 for1x1( train )
    -> 3*T10=2+3+4+1+0 1x8
many updates on one batch are steps
    iter1 fetch1 200( train )
    -> T13=2+6+4+1+0 1x8, 63*T8=0+3+4+1+0 0x-, T5=-+-+4+1+0 0x-, T8=-+-+4+1+3 0x-, 134*T8=0+3+4+1+0 0x-
many updates on one batch are steps, the loader gone
    iter1 fetch1 dead1 200( train )
    -> 2*T8=-+-+4+1+3 0x-, 198*T8=0+3+4+1+0 0x-
a loader that fetches one ahead
    iter1 fetch1 3( fetch1 train ) stop1 train
    -> T12=4+3+4+1+0 1x8, 2*T10=2+3+4+1+0 1x8, T8=0+3+4+1+0 1x8
a silent optimizer falls back to the fetches
    for1x100( fwd bwd wait:1 )
    -> 100*T10=2+3+4+0+1 1x8
the first update after undecided fetches merges them
    iter1 2( 15( fetch1 fwd bwd ) fetch1 train ) stop1
    -> 2*T145=32+48+64+1+0 16x128
an optimizer that falls silent later
    iter1 5( fetch1 train ) 195( fetch1 fwd bwd ) stop1
    -> 5*T10=2+3+4+1+0 1x8, 195*T9=2+3+4+0+0 1x8
the last step ends at its last signal
    iter1 2( fetch1 train ) wait:5000
    -> 2*T10=2+3+4+1+0 1x8
an incomplete last step is dropped
    iter1 fetch1 train fetch1 fwd bwd
    -> T10=2+3+4+1+0 1x8
an interruption closes what is complete and forgets the rest
    iter1 2( fetch1 train ) interrupt wait:5000 bwd opt 2( fetch1 train )
    -> 4*T10=2+3+4+1+0 1x8
an optimizer that raised does not swallow the steps after it
    iter1 fetch1 train fetch1 fwd bwd opt_begin wait:1 4( fetch1 train ) stop1
    -> T10=2+3+4+1+0 1x8, T20=4+6+8+1+1 2x16, 3*T10=2+3+4+1+0 1x8
validation before the batch at hand is trained on [both]
    iter1 2( fetch1 for2x3( eval ) train fetch1 train ) fetch1 for2x2( eval ) fetch1 train stop1
    -> 3*E5=2+3+0+0+0 1x8, T8=0+3+4+1+0 1x8, T10=2+3+4+1+0 1x8, 3*E5=2+3+0+0+0 1x8, T8=0+3+4+1+0 1x8,
       T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8, T10=2+3+4+1+0 1x8
batches of a second loader are looked through for the batch at hand
    for1x4( for2x2( wait:1 ) train )
    -> 4*T16=6+3+4+1+2 1x8
validation in the middle of an epoch, workers started
    iter1 2( 3( fetch1 train ) iter2:800 2( fetch2 fwd ) stop2 wait:50 ) stop1
    -> 3*T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8, 3*T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8
a loop inside an update is of it, whatever it is for [both]
    for1x2( fwd bwd for2x2( eval ) for3x2( fwd bwd ) opt )
    -> 2*T38=10+9+12+1+6 1x8
an inner training loop cuts inside an outer loader
    for1x2( for2x3( train ) )
    -> T12=4+3+4+1+0 1x8, 2*T10=2+3+4+1+0 1x8, T12=4+3+4+1+0 1x8, 2*T10=2+3+4+1+0 1x8
zipped loaders are one step and both waits count
    iter1 iter2 3( fetch1 fetch2:6 train ) stop1 dead2
    -> 3*T16=8+3+4+1+0 1x8
a second loader that is restarted inside the step stays nested
    iter2 iter1 2( fetch1 fetch2 train ) fetch1 stop2 iter2:1 fetch2 train fetch1 fetch2 train stop1
    -> 2*T12=4+3+4+1+0 1x8, T13=4+3+4+1+1 1x8, T12=4+3+4+1+0 1x8
tasks that take turns are steps of their own
    iter1 iter2 4( fetch1 train fetch1 train fetch2 train )
    -> 12*T10=2+3+4+1+0 1x8
the first mark right after a boundary adds no step
    4( train ) 4( train wait:0.1 profiler_step )
    -> T8=-+3+4+1+0 0x-, T8=-+-+4+1+3 0x-, 3*T8=0+3+4+1+0 0x-, 3*T8.1=0+3+4+1+0.1 0x-
a mark at the top of the loop body
    for1x4( user train )
    -> T12=4+3+4+1+0 1x8, 2*T10=2+3+4+1+0 1x8, T8=0+3+4+1+0 0x-
evaluation between marked steps is cut by its fetches
    iter1 3( fetch1 train user for2x2( fwd ) )
    -> T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8, T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8, T10=2+3+4+1+0 1x8,
       2*E5=2+3+0+0+0 1x8
marks alone without any hook are steps
    user 3( wait:5 user )
    -> 3*E5=-+-+0+0+5 0x-
accelerate hands a batch out once the next is there [both]
    2( ahead1 fetch1:10 4( fetch1:10 pass update ) stop1 pass update dead1 wait:100 )
    -> T86=20+20+40+5+1 1x8, 3*T76=10+20+40+5+1 1x8, T66=0+20+40+5+1 1x8, T86=20+20+40+5+1 1x8,
       3*T76=10+20+40+5+1 1x8, T66=0+20+40+5+1 1x8
a loader that was thought to look ahead and does not [both]
    ahead1 4( fetch1:10 pass update ) stop1
    -> 4*T76=10+20+40+5+1 1x8
trainer fetches the batches of an update first, not known to look ahead [both]
    iter1 5( fetch1:10 ) 4( pass ) update 4( fetch1:10 ) 4( pass ) update stop1 dead1 pass update
    -> T296=50+80+160+5+1 4x32, T286=40+80+160+5+1 4x32, T65=0+20+40+5+0 1x8
trainer with evaluation between updates [both]
    ahead1 5( fetch1:10 ) 4( pass ) update 4( fetch1:10 ) 4( pass ) update ahead2 fetch2:10 2( fetch2:10 eval:20
        ) stop2 eval:20 dead2 4( fetch1:10 ) 4( pass ) update 3( fetch1:10 ) stop1 4( pass ) update ahead2 fetch2:10
        2( fetch2:10 eval:20 ) stop2 eval:20 dead2 dead1
    -> T296=50+80+160+5+1 4x32, T286=40+80+160+5+1 4x32, E40=20+20+0+0+0 1x8, E30=10+20+0+0+0 1x8,
       E20=0+20+0+0+0 1x8, T286=40+80+160+5+1 4x32, T276=30+80+160+5+1 4x32, E40=20+20+0+0+0 1x8,
       E30=10+20+0+0+0 1x8, E20=0+20+0+0+0 1x8
trainer's epoch leaves batches over, and its iterator is alive when the next one is asked [both]
    2( ahead1 5( fetch1:10 ) 4( pass ) update fetch1:10 stop1 2( pass ) )
    -> 2*T296=50+80+160+5+1 4x32
a batch is left out among those of an update
    iter1 2( fetch1 fwd bwd fetch1 fetch1 train ) stop1
    -> 2*T21=6+6+8+1+0 3x24
batches fetched together are trained on one after the other [both]
    iter1 3( 2( fetch1:10 ) 2( pass ) update )
    -> 2*T146=20+40+80+5+1 2x16, T145=20+40+80+5+0 2x16
two batches are one pass s input [both]
    iter1 4( 2( fetch1:10 ) pass update )
    -> T86=20+20+40+5+1 1x8, T86=20+20+40+5+1 3x24, T86=20+20+40+5+1 2x16, T85=20+20+40+5+0 2x16
accumulation over two of accelerate's loaders at once [both]
    ahead1 fetch1 fetch1 ahead2 fetch2 fetch2 pass 2( 3( fetch1 fetch2 pass ) update fetch1 fetch2 pass ) stop1 update
    -> T266=20+80+160+5+1 4x32, T262=16+80+160+5+1 4x32, T69=4+20+40+5+0 2x16
a closure holds forward and backward [both]
    for1x4:10( opt_begin closure1 opt_end wait:1 )
    -> 4*T76=10+20+40+5+1 1x8
an iterator of its own for each batch, after the first one, which may be a look alone [both]
    5( iter1 fetch1:10 dead1 train wait:1 )
    -> T8=-+-+4+1+3 0x-, 3*T19=10+3+4+1+1 1x8, T18=10+3+4+1+0 1x8
several of them in a step [both]
    3( 2( iter1 fetch1:10 dead1 fwd bwd ) opt wait:1 )
    -> T26=10+6+8+1+1 1x8, T36=20+6+8+1+1 1x8, T35=20+6+8+1+0 1x8
a look at another loader in each step [both]
    for1x3( train iter2 fetch2 dead2 eval:7 )
    -> 3*T10=2+3+4+1+0 1x8
what a closure does behind its backward pass is no forward [both]
    for1x3:10( opt_begin closure_begin pass wait:30 pass wait:30 closure_end opt_end wait:1 )
    -> 3*T191=10+70+80+0+31 1x8
a closure that is called several times [both]
    3( opt_begin 4( closure1 ) opt_end wait:1 )
    -> T260=-+80+160+20+0 0x-, 2*T261=-+80+160+20+1 0x-
accumulation with a closure [both]
    iter1 3( fetch1:10 pass wait:1 fetch1:10 opt_begin closure1 opt_end wait:1 ) stop1
    -> 3*T147=20+40+80+5+2 2x16
a sanity check and validation that end by count
    iter2 2( fetch2:10 eval:20 ) iter1 dead2 3( fetch1:10 opt_begin closure1 opt_end wait:1 ) iter2 2( fetch2:10
        eval:20 ) dead1 iter1 3( fetch1:10 opt_begin closure1 opt_end wait:1 ) iter2 2( fetch2:10 eval:20 )
        dead2 dead1
    -> 2*E30=10+20+0+0+0 1x8, 3*T76=10+20+40+5+1 1x8, 2*E30=10+20+0+0+0 1x8, 3*T76=10+20+40+5+1 1x8,
       2*E30=10+20+0+0+0 1x8
a loop over training data that does not train is evaluation
    2( for1x3( train ) for1x3( eval:20 ) )
    -> 3*T10=2+3+4+1+0 1x8, 3*E22=2+20+0+0+0 1x8, 3*T10=2+3+4+1+0 1x8, 3*E22=2+20+0+0+0 1x8
an evaluation that is left by count has all of its batches, and none that it fetched in vain [both]
    for1x1( train ) iter2 3( fetch2 eval ) dead2 for1x1( train ) iter2 fetch2 eval:9 2( fetch2 eval ) fetch2 dead2
    -> T10=2+3+4+1+0 1x8, 3*E5=2+3+0+0+0 1x8, T10=2+3+4+1+0 1x8, E11=2+9+0+0+0 1x8, 2*E5=2+3+0+0+0 1x8
a framework's evaluation fetches no batch in vain, however small, nor a single one [both]
    iter1 2( fetch1 train ) eval_begin iter2 3( fetch2 eval:20 ) fetch2 eval:2 dead2 iter3 fetch3 eval:2
        dead3 eval_end 2( fetch1 train )
    -> 2*T10=2+3+4+1+0 1x8, 3*E22=2+20+0+0+0 1x8, 2*E4=2+2+0+0+0 1x8, 2*T10=2+3+4+1+0 1x8
the last evaluation ends with its last batch, whatever follows [both]
    for1x1( train ) iter2 3( fetch2 eval ) wait:900
    -> T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8, E14=2+12+0+0+0 1x8
training and evaluation take turns, each with an iterator of its own [both]
    iter1 iter2 2( fetch1 train fetch1 train fetch2 eval ) fetch1 train stop2 iter2 fetch2 eval fetch1 train stop1
    -> 2*T10=2+3+4+1+0 1x8, E5=2+3+0+0+0 1x8, 2*T10=2+3+4+1+0 1x8, E5=2+3+0+0+0 1x8, T10=2+3+4+1+0 1x8,
       E5=2+3+0+0+0 1x8, T10=2+3+4+1+0 1x8
a second loader's batch that nothing is done with is of the step
    iter1 iter2 3( fetch1 train fetch2 wait:3 ) stop1
    -> 3*T15=4+3+4+1+3 1x8
an evaluation in the midst of an update is none of its time [both]
    iter1 2( 2( fetch1 pass ) eval_begin for2x2( eval ) eval_end fetch1 pass fetch1 pass update ) stop1
    -> 2*E5=2+3+0+0+0 1x8, T130=4+40+80+5+1 4x32, 2*E5=2+3+0+0+0 1x8, T130=4+40+80+5+1 4x32
an evaluation in the midst of an update whose batches are there already [both]
    iter1 4( fetch1 ) 2( pass ) eval_begin for2x2( eval ) eval_end 2( pass ) update stop1
    -> 2*E5=2+3+0+0+0 1x8, T126=0+40+80+5+1 4x32
batches that are only looked through are no steps
    for1x20( wait:1 ) iter1 fetch1 dead1 for1x3( train ) for1x20( wait:1 )
    -> 3*T10=2+3+4+1+0 1x8
a script that only looks through its loader has steps [no optimizer]
    for1x3( wait:1 )
    -> 3*E3=2+1+0+0+0 1x8
a script that only looks through its loader has steps, many [no optimizer]
    for1x300( wait:1 )
    -> 300*E3=2+1+0+0+0 1x8
a model that is tried on one batch first is no step
    iter1 fetch1 fwd:20 dead1 for1x3( train )
    -> 3*T10=2+3+4+1+0 1x8
a batch fetched and not used before the loop is left is no step
    iter2 5( fetch2 eval:20 ) fetch2 wait:0.1 dead2
    -> 5*E22=2+20+0+0+0 1x8
a framework that says it evaluates is believed [both]
    2( for1x3( train ) eval_begin for2x2( wait:3 ) eval_end )
    -> 3*T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8, 3*T10=2+3+4+1+0 1x8, 2*E5=2+3+0+0+0 1x8
what nobody saw begin gives way to a loader's first fetch
    bwd iter1 3( fetch1 train ) stop1
    -> 3*T10=2+3+4+1+0 1x8
another loader leads once the first one is not asked any more
    iter1 iter2 2( fetch1 train ) 24( fetch2 train ) dead2
    -> 26*T10=2+3+4+1+0 1x8
a mark after a loop that ended inside a step
    iter1 3( fetch1 train ) fetch1 fwd bwd stop1 wait:3 user train user
    -> 3*T10=2+3+4+1+0 1x8, T9=2+3+4+0+0 1x8, T8=0+3+4+1+0 0x-
a loop is left before its update, which follows
    iter1 2( fetch1 fwd bwd ) dead1 wait:5 fwd bwd opt
    -> T31=4+14+12+1+0 2x16
updates by hand are cut by the next pass from the same line [no optimizer, both]
    first7 wait:5 5( derive7 wait:5 )
    -> T60=-+20+40+0+0 0x-, 5*T65=-+20+40+0+5 0x-
gradients that are added up are one update by hand [no optimizer]
    first7 2( added7 ) wait:5 3( derive7 2( added7 ) wait:5 )
    -> T180=-+60+120+0+0 0x-, 3*T185=-+60+120+0+5 0x-
two lines that take turns are one step by hand [no optimizer]
    first7 wait:5 first8 wait:5 4( derive7 wait:5 derive8 wait:5 )
    -> T125=-+40+80+0+5 0x-, 4*T130=-+40+80+0+10 0x-
updates that are compiled, and so not heard, are cut by the line of the backward pass
    first7 upd_compiled 3( derive7 added7 wait:5 )
    -> T180=-+60+120+0+0 0x-, 2*T125=-+40+80+0+5 0x-
an update that is heard counts again
    first7 upd_compiled derive7 4( pass update )
    -> T185=-+60+120+5+0 0x-, 2*T66=-+-+40+5+21 0x-, T66=1+20+40+5+0 0x-
an evaluation between steps without a loader is no forward
    6( eval:30 pass update )
    -> T65=-+20+40+5+0 0x-, T96=-+-+40+5+51 0x-, 4*T96=-+20+40+5+31 0x-
a teacher is forward
    4( wait:2 eval901:30 pass update )
    -> T65=-+20+40+5+0 0x-, T98=-+-+40+5+53 0x-, 2*T98=3+50+40+5+0 0x-
"""


def closure(loop: Loop, _number: int, _ms: float) -> None:
    loop.cutter.closure_start(loop.now)
    loop.forward(20)
    loop.backward(40)
    loop.cutter.closure_end(loop.now)
    loop.spend(5)


def derive(cleared: bool | None) -> Callable[[Loop, int, float], None]:
    """A backward pass from a line, in a script whose parameters are changed by hand."""

    def happen(loop: Loop, line: int, _ms: float) -> None:
        loop.forward(20)
        loop.cutter.backward_start(loop.now, line, cleared)
        loop.spend(40)
        loop.cutter.backward_end(loop.now)

    return happen


def mark(source: str) -> Callable[[Loop, int, float], None]:
    return lambda loop, _number, _ms: loop.cutter.mark(source, loop.now)


# word -> (what it does, the number and the milliseconds it has where none are given); iterators are named by loaders
WORDS: dict[str, tuple[Callable[[Loop, int, float], object], int, float]] = {
    "iter": (lambda loop, number, ms: loop.iterate(number, ms), 1, 0),
    "ahead": (lambda loop, number, ms: loop.iterate(number, ms, fetches_ahead=True), 1, 0),
    "length": (lambda loop, number, ms: loop.cutter.loader_length(loop.made[number], int(ms)), 1, 0),
    "fetch": (lambda loop, number, ms: loop.fetch(loop.made[number], ms), 1, 2),
    "stop": (lambda loop, number, ms: loop.stop(loop.made[number], ms), 1, 0),
    "dead": (lambda loop, number, _: loop.dead(loop.made[number]), 1, 0),
    "fwd": (lambda loop, number, ms: loop.forward(ms, True, number), 900, 3),
    "eval": (lambda loop, number, ms: loop.forward(ms, False, number), 900, 3),
    "bwd": (lambda loop, _, ms: loop.backward(ms), 0, 4),
    "bwd_begin": (lambda loop, *_: loop.cutter.backward_start(loop.now), 0, 0),
    "bwd_end": (lambda loop, *_: loop.cutter.backward_end(loop.now), 0, 0),
    "opt": (lambda loop, number, ms: loop.step(number, ms), 500, 1),
    "opt_begin": (lambda loop, number, _: loop.cutter.optimizer_start(number, loop.now), 500, 0),
    "opt_end": (lambda loop, number, _: loop.cutter.optimizer_end(number, loop.now), 500, 0),
    "train": (lambda loop, number, _: loop.train(number), 500, 0),
    "pass": (lambda loop, *_: (loop.forward(20), loop.backward(40)), 0, 0),
    "update": (lambda loop, number, _: (loop.step(number, 5), loop.spend(1)), 500, 0),
    "closure": (closure, 0, 0),
    "closure_begin": (lambda loop, *_: loop.cutter.closure_start(loop.now), 0, 0),
    "closure_end": (lambda loop, *_: loop.cutter.closure_end(loop.now), 0, 0),
    "skipped": (lambda loop, number, _: loop.cutter.optimizer_skipped(number, loop.now), 500, 0),
    "first": (derive(None), 7, 0),
    "derive": (derive(True), 7, 0),
    "added": (derive(False), 7, 0),
    "upd_compiled": (lambda loop, *_: loop.cutter.optimizer_compiled(loop.now), 0, 0),
    "eval_begin": (lambda loop, *_: loop.cutter.evaluation_start(loop.now), 0, 0),
    "eval_end": (lambda loop, *_: loop.cutter.evaluation_end(loop.now), 0, 0),
    "handed": (lambda loop, *_: loop.cutter.handed_over(loop.now), 0, 0),
    "interrupt": (lambda loop, *_: loop.cutter.interrupt(loop.now), 0, 0),
    "wait": (lambda loop, _, ms: loop.spend(ms), 0, 0),
    **{source: (mark(source), 0, 0) for source in ("user", "profiler_step", "xla_sync")},
}


def happen(loop: Loop, words: list[str]) -> None:
    """Do what the words say, up to a closing bracket."""
    while words:
        word = words.pop(0)
        if word == ")":
            return
        if not word.endswith("("):
            name, number, milliseconds = re.fullmatch(r"(\D+?)(\d*)(?::([\d.]+))?", word).groups()  # type: ignore[union-attr]
            do, usual_number, usual_ms = WORDS[name]
            do(loop, int(number or usual_number), float(milliseconds or usual_ms))
            continue
        loader, times, fetch_ms = re.fullmatch(r"(?:for(\d+)x)?(\d+)(?::(\d+))?\(", word).groups()  # type: ignore[union-attr]
        iterator = loop.iterate(int(loader)) if loader else 0
        inside = list(words)
        for _ in range(int(times)):
            words[:] = inside
            if loader:
                loop.fetch(iterator, float(fetch_ms or 2))
            happen(loop, words)
        if loader:
            loop.stop(iterator)


def shown(rows: list[StepRow]) -> str:
    texts = []
    for row in rows:
        parts = "+".join("-" if part is None else f"{part:g}" for part in phases(row))
        samples = "-" if row.samples is None else row.samples
        texts.append(f"{'T' if row.kind == 'train' else 'E'}{row.wall_ns / 1e6:g}={parts} {row.fetches}x{samples}")
    counted = [(len(list(same)), text) for text, same in groupby(texts)]
    return ", ".join(text if count == 1 else f"{count}*{text}" for count, text in counted)


def cases() -> list[object]:
    made: list[object] = []
    for title, flags, body in re.findall(r"^(\S[^\[\n]*?)(?: \[(.*)\])?\n((?: .*\n)+)", SCENARIOS, re.MULTILINE):
        words, _, rows = (" ".join(part.split()) for part in body.partition("->"))
        eager, compiled = "compiled" not in flags, "compiled" in flags or "both" in flags
        for is_compiled in [False] * eager + [True] * compiled:
            values = (words, rows, "no optimizer" not in flags, is_compiled)
            made.append(pytest.param(*values, id=title + ", compiled" * is_compiled))
    return made


@pytest.mark.parametrize(("words", "rows", "optimizers", "compiled"), cases())
def test_a_loop_is_cut_into_its_steps(words: str, rows: str, optimizers: bool, compiled: bool) -> None:
    loop = Loop(optimizers)
    loop.compiled = compiled
    happen(loop, words.split())
    assert shown(loop.finish()) == rows


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_the_columns_of_a_plain_loop(loop: Loop) -> None:
    for _epoch in range(2):
        for _ in loop.batches(loader=1, count=3):
            loop.train()
        for _ in loop.batches(loader=2, count=1):
            loop.forward(gradients=False)
    rows = loop.finish()
    assert [row.step for row in rows] == list(range(8))
    assert [row.epoch for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row.first_batch for row in rows] == [1, 0, 0, 1, 1, 0, 0, 1]
    assert {row.signal for row in rows} <= {"loader", "end"}


def test_an_iterator_may_go_on_to_its_next_epoch(loop: Loop) -> None:
    happen(loop, ["iter1", "length1:4", "8(", "fetch1", "train", ")"])
    assert [row.epoch for row in loop.finish()] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("words", "signals"),
    [
        ("iter1 3( fetch1 fwd bwd ) fetch1 train fetch1 fwd bwd stop1", ["loader"]),
        ("6( wait:2 train )", ["optimizer"] * 6),
        ("iter1 3( fetch1 train fetch1 train user ) stop1", ["loader", "user", "user", "user"]),
        ("4( wait:2 train xla_sync wait:1 user )", ["xla_sync", "user", "user", "user", "user"]),
        ("iter1 2( fetch1 train profiler_step ) 50( fetch1 train ) stop1", ["profiler_step"] * 2 + ["loader"] * 50),
    ],
)
def test_what_cut_a_step_is_said(loop: Loop, words: str, signals: list[str]) -> None:
    happen(loop, words.split())
    assert [row.signal for row in loop.finish()] == signals


def test_time_in_listeners_is_in_no_step(loop: Loop) -> None:
    loop.listener_ms = 1000
    happen(loop, ["for1x4(", "train", ")"])
    rows = loop.finish()
    assert [row.wall_ns for row in rows] == [10_000_000] * 4
    assert rows[1].start_ns - rows[0].start_ns == 1010 * 1_000_000


def test_the_window_flag_sticks_to_every_step_it_touches(loop: Loop) -> None:
    for number in loop.batches(1, 5):
        if number == 1:
            loop.cutter.window(True)
        loop.train()
        if number == 2:
            loop.cutter.window(False)
    assert [row.in_window for row in loop.finish()] == [0, 1, 1, 0, 0]
