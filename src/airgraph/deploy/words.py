"""The structures of the C interface as arrays of 64-bit words, and the tables that a built object holds."""

from __future__ import annotations

MOST_DIMENSIONS = 8  # the most dimensions a tensor of the interface has
MESSAGE_BYTES = 256
LOCK_WORDS = 16  # words that a pthread mutex or condition variable may take: glibc's have at most six


class TensorWords:
    """`struct airgraph_tensor` of the header."""

    DATA, BYTES, DTYPE, RANK, SIZES = range(5)
    WORDS = SIZES + MOST_DIMENSIONS


class InstanceWords:
    """What `create` gives. WEIGHTS: where the weights are, MAPPED: how many bytes of them were mapped from a file. STATE: a
    copy of the weights that the program writes to, or another instance's; OWN_STATE: the copy to be freed. BLOCK: memory
    for intermediates, where the caller brings none. BOUND: the frame is for the sizes in its values."""

    FRAME, THREADS, WEIGHTS, MAPPED, STATE, OWN_STATE, BLOCK, BLOCK_BYTES, POOL, BOUND = range(10)
    MUTEX = 16
    MESSAGE = MUTEX + LOCK_WORDS
    WORDS = MESSAGE + MESSAGE_BYTES // 8


class PortWords:
    """One input or output of the interface: ENTRY is its row in the frame's table of arguments or outputs."""

    ENTRY, DTYPE, ITEM, NAME, WORDS = range(5)


class WeightWords:
    """A weight or constant: its address goes to the word AT of the frame. STATE: where in the instance's own copy it lies,
    or -1 if nothing writes to it."""

    AT, OFFSET, BYTES, STATE, WORDS = range(5)


class RangeWords:
    SYMBOL, LOW, HIGH, NAME, WORDS = range(5)


class GuardWords:
    VALUE, TEXT, WORDS = range(3)


class ThreadPoolWords:
    """The threads of an instance. GENERATION counts parallel regions, DONE the threads that have finished their share;
    each that several threads write has a cache line to itself. HANDLES: one for each thread, from there on."""

    GENERATION, DONE, SLEEPING, CONTEXT, STOP, COUNT = 0, 8, 16, 24, 25, 26
    MUTEX, CONDITION, HANDLES = 32, 48, 64
