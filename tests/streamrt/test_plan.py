"""Pipeline + machine -> processes; what the machine can not give is an error before anything starts."""

from __future__ import annotations

import json
import sys

import pytest

from streamrt.config import parse_pipeline
from streamrt.errors import ConfigError
from streamrt.plan import Machine, Plan, make_plan, size
from streamrt.registry import load_graph

LAPTOP = Machine(cores=(0, 1), memory_bytes=8 * 2**30, shm_bytes=2**30)
SERVER = Machine(
    cores=tuple(range(64)), memory_bytes=512 * 2**30, shm_bytes=256 * 2**30, devices={"cuda:0": 80 * 2**30, "cuda:1": 80 * 2**30}
)

PIPELINE = """
[pipeline]
name = "chain"
[[stage]]
name = "llm"
use = "testing.llm"
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
[deploy.llm]
threads = 2
memory = "2GiB"
[deploy.tts]
replicas = 2
memory = "512MiB"
env = { TTS_DEBUG = "1" }
"""


def plan_of(*overrides: str, machine: Machine = LAPTOP) -> Plan:
    config = parse_pipeline(PIPELINE, "/p/chain.toml", overrides)
    return make_plan(config, *load_graph(config), machine)


def error_of(*overrides: str, machine: Machine = LAPTOP) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(*overrides, machine=machine)
    return str(caught.value)


def test_a_process_for_each_replica_and_gateways_last():
    plan = plan_of("gateway.replicas=2")
    assert plan.levels == (("llm#0",), ("tts#0", "tts#1"), ("gateway#0", "gateway#1"))


def test_a_process_is_told_who_it_is_and_where_the_run_lives():
    llm, _, tts, gateway = plan_of().processes
    assert llm.command("/run/chain") == [sys.executable, "-m", "streamrt.process", "stage", "llm", "--replica", "0", "--run", "/run/chain"]
    assert tts.command("/run/chain")[4:7] == ["tts", "--replica", "1"]
    assert gateway.argv[2:] == ("streamrt.process", "gateway", "gateway", "--replica", "0")


def test_a_stage_gets_its_threads_its_sizes_and_its_own_environment():
    llm, tts, *_ = plan_of("deploy.llm.arena=16MiB").processes
    assert {llm.env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"2"}
    assert llm.arena_bytes == 16 * 2**20
    assert tts.env["TTS_DEBUG"] == "1"
    assert tts.env["OMP_NUM_THREADS"] == "1"


def test_the_classs_default_holds_unless_the_file_says_more():
    assert plan_of().processes[0].max_requests == load_graph(parse_pipeline(PIPELINE))[1]["llm"].max_requests
    assert plan_of("deploy.llm.max_requests=7").processes[0].max_requests == 7


def test_memory_is_summed_by_device_with_the_rings():
    plan = plan_of("deploy.llm.device=cuda:1", machine=SERVER)
    assert plan.memory == {"cpu": 2 * 512 * 2**20 + 4 * 64 * 2**20, "cuda:1": 2 * 2**30}
    assert plan.shm_bytes == 4 * 64 * 2**20


def test_more_memory_than_there_is_says_who_wants_what():
    assert error_of("deploy.llm.memory=12GiB") == (
        "/p/chain.toml: deploy: got 13.2GiB of memory on cpu (llm#0 12GiB, tts#0 512MiB, tts#1 512MiB, rings 256MiB), "
        "expected at most 8GiB, which is what cpu has\n"
        "hint: lower memory, arena or replicas in [deploy], or place a stage on another device"
    )


def test_a_device_that_is_not_there_says_which_are():
    assert error_of("deploy.llm.device=cuda") == (
        '/p/chain.toml: deploy.llm.device: got "cuda", expected "cpu" (what this machine has)\nhint: nvidia-smi finds no GPU on this machine'
    )
    assert error_of("deploy.llm.device=cuda:7", machine=SERVER) == (
        '/p/chain.toml: deploy.llm.device: got "cuda:7", expected one of "cpu", "cuda:0", "cuda:1" (what this machine has)'
    )
    assert plan_of("deploy.llm.device=cuda", machine=SERVER).processes[0].device == "cuda:0"


def test_a_core_that_is_not_there_says_which_are():
    assert error_of("deploy.llm.cores=[1, 2]") == "/p/chain.toml: deploy.llm.cores: got core 2, expected cores that we may run on: 0, 1"


RANKED = """
[pipeline]
name = "ranked"
[[stage]]
name = "r"
use = "testing.ranked"
[deploy.r]
tp = 2
threads = 4
memory = "10GiB"
cores = [2, 3, 4, 5]
"""


def ranked_plan(*overrides: str) -> Plan:
    config = parse_pipeline(RANKED, "/p/ranked.toml", ("gateway.replicas=0", *overrides))
    return make_plan(config, *load_graph(config), SERVER)


def test_each_rank_is_a_process_with_its_share_and_only_the_first_has_a_ring():
    first, second = ranked_plan("deploy.r.device=cuda").processes
    assert (first.name, second.name, second.leader) == ("r#0", "r#0.1", "r#0")
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert (first.cores, second.cores) == ((2, 3), (4, 5))
    assert (first.arena_bytes, second.arena_bytes) == (64 * 2**20, 0)
    assert second.command("/run")[-5:] == ["0", "--rank", "1", "--run", "/run"]
    assert ranked_plan("deploy.r.device=cuda").memory == {"cpu": 64 * 2**20, "cuda:0": 10 * 2**30, "cuda:1": 10 * 2**30}


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (["deploy.r.device=cpu"], ["cpu", "cpu"]),
        (['deploy.r.device=["cuda:1", "cuda"]'], ["cuda:1", "cuda:0"]),
        (["deploy.r.replicas=2"], ["cpu"] * 4),
        (["deploy.r.replicas=2", 'deploy.r.device=["cuda:0", "cuda:1"]'], ["cuda:0", "cuda:1"] * 2),
        (["deploy.r.replicas=2", "deploy.r.tp=1", 'deploy.r.device=["cuda:0", "cuda:1"]'], ["cuda:0", "cuda:1"]),
    ],
)
def test_devices_are_dealt_out_rank_by_rank_and_replica_by_replica(overrides, devices):
    assert [process.device for process in ranked_plan(*overrides).processes] == devices


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("deploy.r.device=cuda:1", 'deploy.r.device: got "cuda:2" for its 2 ranks, expected one of "cpu", "cuda:0", "cuda:1"'),
        ('deploy.r.device=["cpu"]', "deploy.r.device: got 1 devices, expected 2: one for each rank of a replica, or of all replicas"),
        ('deploy.r.device=["cuda", "cuda:0"]', 'got ["cuda", "cuda:0"], expected a GPU of its own for each rank of a replica'),
        ('deploy.r.device=["cpu", "cuda:0"]', "expected a GPU of its own for each rank of a replica, or the CPU for all of them"),
        ("deploy.r.cores=[1, 2, 3]", "deploy.r.cores: got 3 cores, expected a multiple of 2: each rank gets its share"),
        ("deploy.r.tp=0", "deploy.r.tp: got 0, expected a whole number, at least 1"),
        ("deploy.r.device=gpu", 'deploy.r.device: got "gpu", expected "cpu", "cuda" or "cuda:N"'),
    ],
)
def test_what_can_not_be_dealt_out_is_said(override, words):
    with pytest.raises(ConfigError) as caught:
        ranked_plan(override)
    assert words in str(caught.value)


def test_ranks_of_a_stage_that_runs_in_one_process_are_refused():
    assert error_of("deploy.tts.tp=2") == '/p/chain.toml: deploy.tts.tp: got 2, expected 1: "testing.tone" runs in one process'


def test_a_pipeline_that_could_route_no_request_is_not_planned():
    config = parse_pipeline('[pipeline]\nname = "p"\n[[stage]]\nname = "a"\nuse = "echo"\n[[stage]]\nname = "b"\nuse = "echo"\n')
    with pytest.raises(ConfigError, match="each of these stages can respond"):
        make_plan(config, *load_graph(config), LAPTOP)


def test_what_is_only_unwise_is_a_warning():
    plan = plan_of("deploy.llm.threads=4", "deploy.llm.arena=2GiB")
    assert plan.warnings == (
        "llm has 4 threads for 2 cores: they will wait for each other",
        "/dev/shm has 1GiB free for 2.2GiB of rings: those beyond it use memfd",
    )
    assert plan_of().warnings == ()


def test_a_plan_can_be_read_by_people_and_programs():
    plan = plan_of("deploy.llm.cores=[0, 1]")
    text = plan.as_text()
    assert text.startswith("chain: 4 processes\n")
    assert "0      llm#0      cpu     2        0,1    2GiB    16        shm         64MiB\n" in text
    assert "memory on cpu: 3.2GiB of 8GiB\n" in text
    assert json.loads(plan.as_json())["processes"][0]["name"] == "llm#0"


def test_this_machine_has_something():
    machine = Machine.here()
    assert machine.cores
    assert machine.memory_bytes > 2**28


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (2**30, "1GiB"), (13 * 2**30 + 2**28, "13.2GiB")]
)
def test_sizes_for_people(count, text):
    assert size(count) == text
