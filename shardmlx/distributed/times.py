"""The seconds in which ranks find a failure, tell it, and end. They lean on each other; what each
needs of the others is checked as this module is imported.

Pure numbers: no MLX, no MPI.
"""

from __future__ import annotations

from itertools import pairwise

HURRY = 0.02
"""Seconds between two looks while something is going on."""

SECONDS_TO_BE_HEARD = 0.1
"""Seconds for the last message of an ended process, and for answers to mpirun."""

SECONDS_TO_BE_MUTE = 0.3
"""Seconds in an alarm after which a rank that was heard in it no longer lives: each that does is
heard every ``SECONDS_TO_BE_HEARD``."""

SECONDS_OF_A_TURN = 0.2
"""Seconds between ranks that see the same failure: the lowest reports first."""

MOST_TURNS = 8
"""Turns that a rank waits, however many are before it."""

PERIOD = 0.5
"""Seconds between two signs of life."""

MPIRUN_ENDS = 0.5
"""Seconds from mpirun's first signal to its last: SIGCONT, SIGTERM, SIGKILL."""

SECONDS_TO_KILL = 0.7
"""Seconds in which mpirun ends all ranks after one has ended badly."""

MPIRUN_KILLS = 1.0
"""Seconds after a SIGCONT in which mpirun's SIGTERM comes; without one the alarm is over then."""

SECONDS_FOR_LOWER_RANKS = 1.5
"""Seconds for a lower rank to hear of a death or a silence, which it looks for twice a second, and
to report."""

OWN_SLEEP = 2.0
"""Seconds asleep after which a process cannot blame its peers for hearing nothing."""

SECONDS_TO_ABORT = 2.0
"""Seconds for mpirun to end a process that has aborted; it may be unreachable."""

SECONDS_FOR_THE_REPORTER = 2.0
"""Seconds in which the rank that reported the failure ends the job, with its own exit status."""

SHORTEST_SILENCE = 3.0
"""Seconds of silence for which no rank is lost: signs of life may be late on a machine short of
memory."""

SECONDS_TO_FIND = 3.0
"""Seconds in which MPI, or the heartbeat, sees that a rank has died."""

SECONDS_TO_RAISE = 3.0
"""Seconds for the main thread, after a failure, to reach a wait and report it."""

SECONDS_TO_FOLLOW = 4.0
"""Seconds for mpirun to end after a rank that has ended the job."""

SECONDS_TO_BE_ENDED = 4.0
"""Seconds for the reporting rank to end the job; then each process ends itself."""

SECONDS_OF_QUIET = 5.0
"""Seconds until a silent rank is in doubt, and requests that need it may wait."""

SECONDS_FOR_PEERS = 5.0
"""Seconds for the other ranks of rank 0's host to end before it."""

SECONDS_FOR_RANK_0 = 5.0
"""Seconds, more than ranks start apart, for rank 0 to say what is wrong with the options, or which
ranks have not come."""

SECONDS_TO_AGREE = 15.0
"""Seconds for mpirun to end after its ranks; it takes one, unless cores are busy."""

SECONDS_TO_COME = 30.0
"""Seconds in which all ranks have mostly come to the start of MPI; then a line says who has not."""

LONGEST_SILENCE = 60.0
"""Seconds until a silent rank is lost, however long a message may take."""

SECONDS_TO_LEAVE = 600.0
"""Seconds, at least, that finished ranks wait for the others."""

MOST_SECONDS_TO_END = 10.0
"""Seconds in which a job ends, once a rank has failed or died."""


def turn(rank: int) -> float:
    """Return the seconds in which lower ranks may report the failure that a rank sees, too."""
    return SECONDS_OF_A_TURN * min(rank, MOST_TURNS)


def silence_limit(timeout: float) -> float:
    """Return the seconds after which a silent rank is lost, if a message may take ``timeout``.

    The limit is below the timeout: otherwise a rank could first blame one that itself waits for the
    lost rank.
    """
    return min(max(timeout - 2 * PERIOD, SHORTEST_SILENCE), LONGEST_SILENCE)


def in_order(*seconds: float) -> None:
    """Raise ``ValueError`` unless each time is longer than the one before."""
    if any(first >= second for first, second in pairwise(seconds)):
        raise ValueError(f"{' s, '.join(f'{each:g}' for each in seconds)} s: not in order")


TO_TELL = PERIOD + SECONDS_TO_BE_HEARD
"""Seconds in which all peers hear what a rank has to say."""

# In a hurry a rank looks several times before it concludes from silence that a process is gone, and
# hears of a lower rank's report before its own turn comes.
in_order(2 * HURRY, SECONDS_TO_BE_HEARD, SECONDS_OF_A_TURN)
# A rank in an alarm is not mute because a message or two of it is late. One that died with another
# is, before mpirun ends the rest.
in_order(2 * SECONDS_TO_BE_HEARD, SECONDS_TO_BE_MUTE, MPIRUN_ENDS)
# An alarm lasts until mpirun has sent its last signal, to ranks that react within a moment.
in_order(MPIRUN_ENDS, SECONDS_TO_KILL, MPIRUN_KILLS)
# A lower rank looks, hears, and reports, before a higher one that has seen the same does.
in_order(TO_TELL, SECONDS_FOR_LOWER_RANKS, SECONDS_TO_FIND)
# A process that slept knows it before it could take others for silent, who sent some signs of life.
in_order(2 * PERIOD, OWN_SLEEP, SHORTEST_SILENCE, SECONDS_OF_QUIET, LONGEST_SILENCE)
# mpirun has ended a process before that ends itself; then mpirun is made to end.
in_order(SECONDS_TO_KILL, SECONDS_TO_ABORT, SECONDS_TO_FOLLOW, SECONDS_TO_AGREE)
# A rank that may not report lets the one that does tell all peers, and mpirun end the job.
in_order(TO_TELL + SECONDS_TO_KILL, SECONDS_FOR_THE_REPORTER, SECONDS_FOR_RANK_0)
# A rank that has heard a report leaves the end of the job to the reporter.
in_order(TO_TELL + SECONDS_TO_ABORT, SECONDS_TO_BE_ENDED)
# All ranks of a host end before rank 0 does, and that before mpirun is made to.
in_order(SECONDS_FOR_PEERS, SECONDS_TO_AGREE)
# The last rank in turn that must give up for its main thread, which hangs, still ends in time.
in_order(SECONDS_TO_RAISE + turn(MOST_TURNS) + TO_TELL + SECONDS_TO_ABORT, MOST_SECONDS_TO_END)
# So do all that cannot be told by mpirun, whose host is lost, if the reporter's main thread hangs.
in_order(
    SECONDS_FOR_LOWER_RANKS + SECONDS_TO_RAISE + TO_TELL + SECONDS_TO_BE_ENDED, MOST_SECONDS_TO_END
)
