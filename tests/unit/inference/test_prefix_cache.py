"""Which sequences are kept, and what of a prompt they begin."""

from __future__ import annotations

from shardmlx.inference.prefix_cache import CachedPrefix, PrefixCache
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.sizes.kv_cache import CacheQuantisation, held
from testbed.family_configs import CONFIGS


def test_caches_have_room_for_whole_steps() -> None:
    assert [held(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_a_sequence_that_grows_takes_all_of_what_was_kept() -> None:
    """The last token of a prompt is always computed."""
    cache = PrefixCache(shortest=2)
    cache.keep(0, [1, 2, 3])
    assert cache.take([1, 2, 3]) == CachedPrefix(sequence=0, length=2, is_whole=False)
    assert cache.take([1, 2, 3, 4, 5]) == CachedPrefix(sequence=0, length=3, is_whole=True)
    assert cache.take([1, 2, 3, 4, 5]) is None
    assert cache.tokens == 0


def test_the_longest_beginning_wins_and_a_part_of_a_sequence_leaves_it_kept() -> None:
    cache = PrefixCache(shortest=2)
    cache.keep(0, [1, 2, 9, 9])
    cache.keep(1, [1, 2, 3, 9])
    prompt = [1, 2, 3, 4, 5]
    assert cache.take(prompt) == CachedPrefix(sequence=1, length=3, is_whole=False)
    assert cache.take(prompt) == CachedPrefix(sequence=1, length=3, is_whole=False)


def test_what_has_been_forgotten_cannot_be_cut() -> None:
    """A cache of limited size goes on as it is, or not at all."""
    cache = PrefixCache(trimmable=4, shortest=2)
    cache.keep(0, [1, 2, 3, 4])
    assert cache.take([1, 2, 3, 9, 9]) is None
    assert cache.take([1, 2, 3, 4, 9]) == CachedPrefix(sequence=0, length=4, is_whole=True)
    cache.keep(1, [1, 2, 3])
    assert cache.take([1, 2, 9, 9]) == CachedPrefix(sequence=1, length=2, is_whole=False)


def test_a_quantised_cache_serves_only_where_that_of_the_prompt_would_be_quantised() -> None:
    """From four tokens on: the text of a prompt does not depend on others."""
    how = CacheQuantisation(bits=4, group_size=32, start=4)
    cache = PrefixCache.of(read_shape(CONFIGS["qwen3"]), shortest=2, quantisation=how)
    cache.keep(0, [1, 2, 3, 4, 5, 6])
    assert cache.take([1, 2, 3, 9, 9]) is None
    assert cache.take([1, 2, 3, 4, 9]) == CachedPrefix(sequence=0, length=4, is_whole=False)
    cache.keep(1, [1, 2, 3])  # plain
    assert cache.take([1, 2, 9, 9]) == CachedPrefix(sequence=1, length=2, is_whole=False)
    assert cache.take([1, 2, 3, 9]) == CachedPrefix(sequence=1, length=3, is_whole=True)
    # Of a recurrent model a border counts as the length that it is cut to.
    cache = PrefixCache(0, shortest=2, has_borders=True, quantised=4)
    cache.keep(0, [1, 2, 3, 4, 5, 6], borders=(3, 5))
    assert cache.take([1, 2, 3, 4, 9, 9]) is None
    begin = CachedPrefix(sequence=0, length=5, is_whole=False)
    assert cache.take([1, 2, 3, 4, 5, 9, 9]) == begin


def test_those_used_longest_ago_go_first() -> None:
    cache = PrefixCache(shortest=2)
    for sequence in range(3):
        cache.keep(sequence, [sequence] * 10)
    assert cache.take([0] * 5) is not None  # a part: used, and kept
    assert cache.tokens == 3 * 256
    assert cache.shrink(600) == [1]
    assert cache.shrink(256) == [2]
    assert cache.shrink(256) == []
    assert cache.shrink(0) == [0]


def test_states_are_kept_before_the_end_of_a_prompt_and_where_it_leaves_another() -> None:
    cache = PrefixCache(0, shortest=2, has_borders=True)
    assert cache.borders([1, 2, 3]) == ()
    assert cache.borders([1, 2, 3, 4, 5, 6]) == (3,)
    cache.keep(0, [1, 2, 3, 4, 5, 6], borders=(3,))
    second = [1, 2, 3, 4, 9, 9, 9, 9]
    assert cache.borders(second) == (4, 5)
    assert cache.take(second) == CachedPrefix(sequence=0, length=3, is_whole=False)
    cache.keep(1, second, borders=(4, 5))
    assert cache.take([1, 2, 3, 4, 8]) == CachedPrefix(sequence=1, length=4, is_whole=False)
    whole = CachedPrefix(sequence=1, length=8, is_whole=True, borders=(4, 5))
    assert cache.take([*second, 7]) == whole


def test_a_model_whose_caches_can_be_cut_needs_no_borders() -> None:
    assert PrefixCache(shortest=2).borders([1, 2, 3, 4, 5, 6]) == ()


def test_few_states_are_kept() -> None:
    cache = PrefixCache(0, shortest=2, has_borders=True)
    for sequence in range(9):
        cache.keep(sequence, [sequence] * 10, borders=(7,))
    assert cache.shrink(10**6) == [0]
