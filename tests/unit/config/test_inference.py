"""Options of mlx_lm: taken by our commands, or refused by name with a reason."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

import pytest
from mlx_lm import lora

from shardmlx.config.command_line import CommandLine
from shardmlx.config.inference import CHAT, GENERATE, GenerateConfig
from shardmlx.config.options import OptionError
from shardmlx.config.serve import LINE as SERVE
from shardmlx.config.serve import ServeConfig, check_packages
from shardmlx.config.train import LINE as TRAIN
from shardmlx.errors import UserError
from tests.helpers.refusals import refusal


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def server_flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the flags of mlx_lm.server, which builds its parser in ``main``."""
    from mlx_lm import server

    class Built(Exception):
        pass

    def stop(parser: argparse.ArgumentParser, *args: Any) -> None:
        raise Built(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Built) as built:
        server.main()
    return flags_of(built.value.args[0])


def test_every_flag_of_mlx_lm_is_taken_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, ours in (("generate", GENERATE), ("chat", CHAT)):
        theirs = importlib.import_module(f"mlx_lm.{name}").setup_arg_parser()
        assert flags_of(theirs) <= flags_of(ours.parser()) | {*ours.refused}
    assert server_flags(monkeypatch) <= flags_of(SERVE.parser()) | {*SERVE.refused}
    assert flags_of(lora.build_parser()) <= flags_of(TRAIN.parser())


@pytest.mark.parametrize(
    ("line", "words", "reason"),
    [
        (CHAT, "--pipeline", "ranks are always a pipeline here"),
        (SERVE, "--log-level INFO", "give --access-log"),
        (SERVE, "--prompt-cache-bytes 1GB", "give --cache-tokens"),
    ],
)
def test_a_flag_that_is_not_here_says_why(line: CommandLine[Any], words: str, reason: str) -> None:
    assert str(refusal(line.load, words.split())).startswith(
        f"{words.split()[0]} is not here: {reason}"
    )


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--kv-bits 7", "2, 3, 4, 5, 6, 8"),
        ("--kv-bits 4 --max-kv-size 64", "one of them"),
        ("--num-draft-tokens many", "auto"),
        ("--num-draft-tokens 0", "1 or more"),
        ("--draft mtp --tensor-parallel 2", "lookup"),
        ("--tensor-shares 2,1", "one for each rank"),
        ("--tensor-shares 2,x --tensor-parallel 2", "one for each rank"),
        ("--xtc-threshold 0.6", "0.5 or less"),
        ("--seed 18446744073709551616", "18446744073709551615 or less"),
        ("--output a", "--prompts"),
        ("--prompt b --prompts a", "one of them"),
        ("--temperature 1", "--temp"),
        ("--chat-template-config [1]", "a JSON object"),
    ],
)
def test_bad_options(words: str, remedy: str) -> None:
    error = refusal(GENERATE.load, words.split())
    assert words.split()[0] in error.problem
    assert remedy in str(error)


def test_spellings_of_mlx_lm_mean_the_same() -> None:
    config = GENERATE.load(["--extra-eos-token", "<|a|>", "<|b|>", "--verbose", "False"])
    assert config.extra_eos_token == ["<|a|>", "<|b|>"]
    assert not config.verbose
    assert GENERATE.load(["--extra-eos-token", "a b"]).extra_eos_token == ["a", "b"]
    assert GENERATE.load(["--draft-model", "small"]).draft_model == "small"
    served = SERVE.load(
        [
            "--allowed-origins",
            "https://a.org,http://b:80,null,*",
            "--chat-template-args",
            '{"x": 1}',
        ]
    )
    assert served.allow_origin == "https://a.org,http://b:80,null,*"
    assert served.template_arguments == {"x": 1}


def test_a_list_has_texts_alone() -> None:
    for words in ([5], ["a", None], [["a"]]):
        error = refusal(GenerateConfig.from_flat, extra_eos_token=words)
        assert str(error) == f"extra_eos_token is {words!r}: give a list of texts"


@pytest.mark.parametrize("origin", ["example.org", "https://a.org,https://b.org/", "https://*.org"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    error = refusal(SERVE.load, ["--allow-origin", origin])
    assert error.problem == f"--allow-origin is {origin}"


@pytest.mark.parametrize("host", ["http://x/", "x.org,x.org:80", "x/a", "*", "[::1]"])
def test_a_host_that_no_client_sends_is_refused(host: str) -> None:
    error = refusal(SERVE.load, ["--allow-host", host])
    assert error.problem == f"--allow-host is {host}"
    SERVE.load(["--model", "m", "--allow-host", "x.org, my-mac.local,FE80::1,::1,10.0.0.1"])


@pytest.mark.parametrize("flag", ["--prompt", "--extra-eos-token"])
def test_a_text_that_is_not_utf_8_is_refused(flag: str) -> None:
    error = refusal(GENERATE.load, ["--model", "m", flag, os.fsdecode(b"a\xff")])
    assert error.problem.startswith(f"{flag} is ")


def test_a_server_plans_for_the_bodies_of_requests() -> None:
    assert ServeConfig.from_flat(max_body=2000).bytes_for_requests == (8 + 20) * 2000
    assert GenerateConfig.from_flat(prompt="a").bytes_for_requests == 0


@pytest.mark.parametrize(
    ("given", "named", "remedy"),
    [
        ({"max_adapters": 2}, "max_adapters", "add it"),
        ({"state_dir": "elsewhere"}, "state_dir", "add it"),
        ({"train": True, "draft": "lookup"}, "draft", "leave it out"),
        ({"train": True, "kv_bits": 4}, "kv_bits", "leave it out"),
        ({"train": True, "adapter_path": "adapters"}, "adapter_path", "fuse"),
        ({"train": True, "prefix_cache_dir": "kept"}, "prefix_cache_dir", "leave it out"),
    ],
)
def test_options_that_do_nothing_with_or_without_training(
    given: dict[str, Any], named: str, remedy: str
) -> None:
    with pytest.raises(OptionError) as caught:
        ServeConfig.from_flat(model="m", **given)
    assert caught.value.name == named
    assert remedy in caught.value.remedy


def test_training_plans_for_what_clients_send() -> None:
    plain, training = (ServeConfig.from_flat(model="m", train=train) for train in (False, True))
    assert training.bytes_for_requests > plain.bytes_for_requests
    assert training.loop_spec.answers.bytes_for_requests == training.bytes_for_requests
    assert training.loop_spec.loop.state_dir == "states"


def test_training_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    check_packages(ServeConfig.from_flat(model="m"))
    with pytest.raises(UserError) as caught:
        check_packages(ServeConfig.from_flat(model="m", train=True))
    assert "tinker" in caught.value.problem
    assert caught.value.remedy == "pip install 'shardmlx[train-api]'"
