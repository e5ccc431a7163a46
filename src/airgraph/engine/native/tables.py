"""The tables that native code reads, all arrays of 64-bit words: these classes name the words."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


class ProgramWords:
    FRAMES, POOL, WORDS = 0, 1, 2


class PoolWords:
    """BLOCKS: the first one that is free. THREADS: the most that a program may use."""

    BLOCKS, THREADS, WORDS = range(3)


class BlockWords:
    NEXT, BASE, SIZE, WORDS = 0, 1, 2, 3


class FrameWords:
    NEXT, BASE, ARGS, ARG_TABLE, OUTS, OUT_TABLE, SLOTS, PLACED, PLACE_TABLE, NEED, STEPS, STEP_TABLE = range(12)
    NUMBER, THREADS, ERRORS, ERROR_TABLE, OBJECTS, LIST, CALLBACK, TENSOR_TYPE, PARAMETER_TYPE = range(12, 21)
    DISPATCH, LET_GO, MADE, MADE_TABLE, SCRATCH = range(21, 26)
    BINDING, VALUES, SIZED, WORD_TABLE, NONE = range(26, 31)  # SIZED: words that depend on sizes (binding.py)
    SWEEPS, SWEEP_TABLE, ALONE_UNTIL, WORDS = range(31, 35)  # see SweepWords; steps.py, in milliseconds


class BindingWords:
    """What all frames of a program need for new sizes. SYMBOLS: how many; the number of threads is the first."""

    DEFINITIONS, DEFINITION_TABLE, SYMBOLS, OPERATIONS, CODE, QUESTIONS, WORDS = range(7)


class DefinitionWords:
    """Where a symbol has its value from: a SIZE or a STRIDE of an argument, less OFFSET, divided by FACTOR, or a NUMBER."""

    SYMBOL, ARGUMENT, KIND, AXIS, FACTOR, OFFSET, WORDS = range(7)
    SIZE, STRIDE, NUMBER = range(3)


class LocationWords:
    """Where the memory of SLOT is: OFFSET bytes behind that of slot HOME, or (0) behind the scratch memory in the block."""

    SLOT, HOME, OFFSET, WORDS = range(4)


class EntryWords:
    """One argument or output. KIND: NOTHING to do, a TENSOR, a WHOLE number (VALUE), a FLOAT (for the slot VALUE).
    A TOKEN is an empty tensor, or None: PyTorch orders effects by it. An output is NOTHING (PyTorch made it), a TENSOR, or
    a NUMBER (VALUE)."""

    KIND, DTYPE, DIM, SIZES, STRIDES, VALUE, ADDRESS, TAG, WORDS = range(9)  # ADDRESS: the only one it may have, or 0
    NOTHING, TENSOR, WHOLE, FLOAT, NUMBER, TOKEN = range(6)


class TagWords:
    """What an argument must be while a frame reads a packed copy of it: this OBJECT of Python's, at this VERSION, with
    SAMPLES of its content, each a byte offset and the 32 bits there. Or, with a WATCH (WatchWords), VERSION is the
    generation that its memory must have; SWEPT: 1 where a sweep of the frame (SweepWords) finds writes to its pages."""

    OBJECT, VERSION, SAMPLES, SAMPLE_TABLE, WATCH, SWEPT, WORDS = range(7)


class SweepWords:
    """What PAGEMAP_SCAN is asked for several tensors at once: a FILE and the address of its argument."""

    FILE, SCAN, WORDS = range(3)


class WatchWords:
    """Memory whose pages the kernel watches (write_watch.py): the address of its GENERATION, what PAGEMAP_SCAN is asked for
    (a FILE and the address of its argument), and both ENDS: where they are, what was there, how many bytes."""

    GENERATION, FILE, SCAN, ENDS, WORDS = 0, 1, 2, 3, 9


class StepWords:
    """CALL: a step of native code, or a call of PyTorch by PYTHON or through its DISPATCHER (with a TAPE: dispatch.py)."""

    CALL, FUNCTION, ARGS, SIZES, JOBS, UNIT, SINGLE, END, SYNC, TAPE, RELEASE, WORDS = range(12)
    NATIVE, PYTHON, DISPATCHER = range(3)


class ReleaseWords:
    """What is let go before a call of PyTorch: so many ARGUMENTS, then so many RESULTS, from FIRST on."""

    ARGUMENTS, RESULTS, NONE, FIRST = range(4)


class ContextWords:
    """What the threads of a parallel region share. STOP: leave at the next step. CHECKED: when signals were looked at.
    WAITED: nanoseconds that the calling thread waited at barriers. FINISHED: when its share was done.

    COUNTER, which all of them write, has a line of the cache to itself.
    """

    FRAME, FIRST, LAST, THREADS, STOP, CHECKED, WAITED, FINISHED = range(8)
    COUNTER, WORDS = 14, 22


class DirectCallWords:
    """A call without a frame of Python. PROFILER, LOG: dictionaries that have to have False at their KEY. FALLBACK: what is
    called instead, or 0. WIDTH: the number of arguments. CALLS: where they are counted. WRITES: a table of the arguments
    that are written to, or 0. FORM: of the results, LIST to SINGLE."""

    PROFILER, PROFILER_KEY, LOG, LOG_KEY, FALLBACK, NONE, FALSE, WIDTH, CALLS, WRITES, FORM, OWN = range(12)
    LIST, TUPLE, SINGLE = range(3)


class ShortCallWords(DirectCallWords):
    """A replay that is one launch (short_call.py). ACQUIRE, RELEASE: methods of the arena's lock. CURRENT gives the stream,
    CAPTURING tells whether the user captures on it. TICK: where uses are counted. TAGS, STATE, STATE_WRITES: tables of a
    model's state, or 0. LAUNCHES: COUNT addresses of LaunchWords."""

    ACQUIRE, RELEASE, CURRENT, CAPTURING, ARENA, TICK = range(DirectCallWords.OWN, DirectCallWords.OWN + 6)
    TAGS, STATE, STATE_WRITES, COUNT, LAUNCHES, WORDS = range(DirectCallWords.OWN + 6, DirectCallWords.OWN + 12)


class FrameCallWords(DirectCallWords):
    """A call of a native program (frame_call.py). PROGRAM: the builtin that takes a list. BY_PYTHON: where it is 1 if
    Python does some of the steps. GATHER: GatherWords of the state among the arguments, or 0. RESULTS: the class list.
    FAILED: what is told about a result of another class. FINISH: what is called after an exception. FRONT: the number of
    tensors in front of the arguments, and those, or 0. TAGS: the table of dictionaries that says whether they still are."""

    PROGRAM, BY_PYTHON, GATHER, RESULTS, FAILED, FINISH = range(DirectCallWords.OWN, DirectCallWords.OWN + 6)
    FRONT, TAGS, WORDS = range(DirectCallWords.OWN + 6, DirectCallWords.OWN + 9)


class ArenaWords:
    """BUSY: 1 while something runs in the arena. LAST: the stream of the last replay."""

    BUSY, LAST, WORDS = range(3)


class RecordingWords:
    """HITS, USED: how often, and when. VERSION: of the slots when FREE was found, a table with the number of slots and, for
    each, the address of its count of references and what that is while nobody holds it."""

    HITS, USED, VERSION, FREE, WORDS = range(5)


class LaunchWords:
    """A recording as ShortCallWords have it: RECORDING (words), where the VERSION of the slots is, the tables of `same`,
    `laid_out` (or 0) and `make`, and objects of Python: what LAUNCHes it, called with a tuple of ARGUMENTS, and what it
    needs, which is KEPT meanwhile. GATHER, UNMOVED: tables of the state that it reads from modules among the arguments, or
    0."""

    RECORDING, VERSION, SAME, LAID_OUT, MAKE, LAUNCH, ARGUMENTS, KEPT, GATHER, UNMOVED, WORDS = range(11)


class GatherWords:
    """State that is read from modules (state_gather.py). WIDTH: the number of arguments. ROOTS: pairs of an argument and
    the module that it was. OWNERS: OwnerWords, each behind the one that it was found in. ITEMS: for each argument the
    object that takes its place, or 0. NONE: Python's None."""

    WIDTH, ROOT_COUNT, ROOTS, OWNER_COUNT, OWNERS, ITEMS, NONE, WORDS = range(8)


class OwnerWords:
    """A dictionary as it was when state was read from it, by its version TAG. That of the attributes of an OBJECT may have
    changed otherwise: what counts are the PAIRS in it, the first so many of which are a key and a value. OBJECT is 0 for a
    dictionary that is such a value."""

    OBJECT, DICT, TAG, PAIRS, FIRST, WORDS = 0, 1, 2, 3, 4, 10


class ObjectWatchWords:
    """Objects as they were (object_watch.py): the address of the ROOT, and COUNT rows of WatchedWords, each behind that of
    the object it was found in."""

    ROOT, COUNT, ROWS = range(3)


class WatchedWords:
    """What was read of an object, by KIND: the word at an ADDRESS, of which the bits of a MASK are as EXPECTED; a TENSOR,
    the OBJECT of Python with that of C++ (IMPL) and its KNOWN words; or a DICT with its TAG, whose address is at the PLACE
    of an object's attributes or (0) which was found elsewhere. ENTRIES: their number (-1: all count), then a key and a
    value or 0 for each. NEAR and FAR, of every kind, are addresses that it reads."""

    KIND, WORDS = 0, 5
    WORD, TENSOR, DICTIONARY = range(3)  # kinds
    NEAR, FAR = 1, 2
    ADDRESS, _, MASK, EXPECTED = range(1, 5)
    OBJECT, IMPL, KNOWN = range(1, 4)
    PLACE, DICT, TAG, ENTRIES = range(1, 5)


class WatcherWords:
    """The WATCH that is asked first (0: none), what is called otherwise (LOOK; 0: nothing, and FALSE is the answer),
    Python's TRUE and FALSE, how often the watch held (HITS), and the NAME of the root among the entries of what is given
    (0: it is the root itself)."""

    WATCH, LOOK, TRUE, FALSE, HITS, NAME = range(6)


class OutsideWords:
    """COUNT addresses of objects at PLACES, and Python's TRUE and FALSE."""

    COUNT, PLACES, TRUE, FALSE = range(4)


# What `call` returns in place of results. RAISED stays inside: `call` returns null, with the exception pending.
NO_FRAME, NO_BLOCK, RAISED, BAD_INDEX, ZERO_DIVISION, TORCH_FAILED = range(1, 7)


LEAST, MOST = -(1 << 63), (1 << 63) - 1


def words(values: Sequence[int]) -> Any:
    """An array of them. (ctypes would cut off what does not fit.)"""
    for value in values:
        in_a_word(value)
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def word_property(index: int) -> Any:
    """An attribute that native code reads, too: a word of the array `words`."""
    return property(lambda owner: owner.words[index], lambda owner, value: owner.words.__setitem__(index, value))


def in_a_word(number: int) -> int:
    if not LEAST <= number <= MOST:
        raise OverflowError(f"{number} does not fit in 64 bits")
    return number
