"""Where ranks go: how many, with how many threads, at which address; and the heap of each."""

import socket

import pytest

from drivetrain.config import LaunchConfig
from drivetrain.config.document import Layer, ValueOrigin
from drivetrain.errors import ConfigError
from drivetrain_launch.ranks.channel import FILE_VARIABLE, SECRET_VARIABLE, shared_secret
from drivetrain_launch.ranks.placement import (
    Endpoint,
    Slot,
    check_agreement,
    heap_variables,
    interface_of,
    listening_address,
    local_ranks,
    node_names,
    recognise,
    tasks_on,
    threads,
)

HEAP = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def test_local_ranks():
    for launch, accelerators, ranks in (
        (LaunchConfig(), 0, 6),
        (LaunchConfig(), 4, 4),
        (LaunchConfig(device="cpu"), 4, 6),
        (LaunchConfig(nproc_per_node=3), 4, 3),
        (LaunchConfig(nproc_per_node=9), 0, 9),
        (LaunchConfig(nproc_per_node=9, device="cpu"), 4, 9),
    ):
        assert local_ranks(launch, accelerators=accelerators, cores=6) == ranks, launch

    with pytest.raises(ConfigError, match="each of the 5 ranks of this host, found 4"):
        local_ranks(LaunchConfig(nproc_per_node=5), accelerators=4, cores=8)


def test_threads_divide_the_cores(monkeypatch):
    for ranks, expected in ((1, "8"), (3, "2"), (8, "1"), (20, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert threads(LaunchConfig(), ranks, cores=8) == expected, ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # which the user set
    assert threads(LaunchConfig(), 2, cores=8) is None
    assert threads(LaunchConfig(threads_per_rank=3), 2, cores=8) == "3"


def test_malformed_endpoints_are_refused():
    for text in ("host", "host:", ":80", "host:0", "host:65536", "a b:80", "::1:80"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            Endpoint.parse(text)
    for text in ("host.example:29400", "10.0.0.1:1", "[::1]:65535"):
        assert str(Endpoint.parse(text)) == text, text


def test_address_is_the_one_on_the_route():
    assert interface_of("127.0.0.1").startswith("lo")
    assert interface_of("192.0.2.1") is None


def test_busy_port_is_refused_and_a_free_one_is_not(port):
    busy = pytest.raises(ConfigError, match=f"cannot listen on port {port}")
    with socket.create_server(("127.0.0.1", port)), busy:
        listening_address(Endpoint("127.0.0.1", port))
    assert listening_address(Endpoint("127.0.0.1", port)) == "127.0.0.1"


@pytest.fixture
def heap_not_set(monkeypatch):
    for name in HEAP:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("heap_not_set")
def test_freed_memory_stays_on_the_cpu_only():
    assert set(heap_variables(LaunchConfig(), accelerators=0)) == set(HEAP[:2])
    assert not heap_variables(LaunchConfig(), accelerators=2)
    assert not heap_variables(LaunchConfig(keep_memory=False), accelerators=0)


@pytest.mark.usefixtures("heap_not_set")
def test_heap_settings_of_the_user_stay_and_other_tunables_are_none(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert heap_variables(LaunchConfig(), accelerators=0)
    for name, value in ((HEAP[0], "65536"), (HEAP[1], "1"), (HEAP[2], "glibc.malloc.arena_max=1")):
        monkeypatch.setenv(name, value)
        assert not heap_variables(LaunchConfig(), accelerators=0), name


# --- schedulers' variables: what is recognised, and what is refused with which way out ---


def variables(text):
    """Return the variables of a text of NAME=VALUE."""
    return dict(pair.split("=", 1) for pair in text.split())


PET = variables(
    "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 PET_MASTER_ADDR=job-node-0-0.job "
    "PET_MASTER_PORT=29500"
)
INDEXED = PET | {"PET_NODE_RANK": "", "JOB_COMPLETION_INDEX": "1"}
STEP = variables(
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_NODELIST=n[07-08] SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_NODEID=1 SLURM_PROCID=1 "
    "SLURM_LOCALID=0"
)
DEVICES = STEP | variables(
    "SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_PROCID=6 SLURM_LOCALID=2"
)
MPI = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=n1"
)
JOB = "MASTER_ADDR= OMPI_MCA_ess_base_jobid=3512"
FROM_MPIRUN = variables(f"{JOB} OMPI_MCA_orte_hnp_uri=3512.0;tcp://10.0.0.4:4711")
ONE_HOST = variables(f"{JOB} OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2")
TWO_ADDRESSES = {"OMPI_MCA_orte_hnp_uri": "3512.0;tcp://10.0.0.4,172.17.0.1:4711"}
MPICH = variables(
    "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=fe80::1 "
    "MASTER_PORT=29400"
)
PALS = variables("PALS_RANKID=1 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4 MASTER_ADDR=n1")
PLAIN = variables("RANK=3 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=1234")
LOCAL = variables("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
SKY = variables("SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1 SKYPILOT_TASK_ID=sky-1")
SKY["SKYPILOT_NODE_IPS"] = "10.0.0.4\n10.0.0.5"


def test_recognised():
    for environment, hosts, slot, run in (
        (PET, (2, 1, "job-node-0-0.job:29500"), None, ""),
        (STEP, (2, 1, "n07:31110"), None, "4711.0"),
        (DEVICES, (8, 6, "n07:31110"), Slot(local_rank=2, local_size=4), "4711.0"),
        (MPI, (4, 3, "n1:29500"), Slot(local_rank=1, local_size=2), ""),
        (MPI | STEP, (4, 3, "n1:29500"), Slot(local_rank=1, local_size=2), ""),
        (MPI | FROM_MPIRUN, (4, 3, "10.0.0.4:23034"), Slot(local_rank=1, local_size=2), "3512"),
        (MPI | ONE_HOST, (2, 1, "127.0.0.1:23034"), Slot(local_rank=1, local_size=2), "3512"),
        (MPICH, (4, 1, "[fe80::1]:29400"), Slot(local_rank=1, local_size=2), ""),
        (PALS, (4, 1, "n1:29500"), Slot(local_rank=1, local_size=4), ""),
        (SKY, (2, 1, "10.0.0.4:8008"), None, "sky-1"),
        (PLAIN, (4, 3, "n1:1234"), Slot(), ""),
        (PLAIN | LOCAL, (4, 3, "n1:1234"), Slot(local_rank=1, local_size=2), ""),
        (PLAIN | STEP, (2, 1, "n07:31110"), None, "4711.0"),
        (INDEXED, (2, 1, "job-node-0-0.job:29500"), None, ""),
        (PET | {"PET_RDZV_ENDPOINT": "h:1", "PET_MASTER_ADDR": ""}, (2, 1, "h:1"), None, ""),
    ):
        found = recognise(environment)
        values = {key.removeprefix("launch."): value for key, value, _ in found.entries}
        place = values["nnodes"], values["node_rank"], values["rdzv_endpoint"]
        assert (place, found.slot, found.run) == (hosts, slot, run), environment
        if slot:
            assert values["nproc_per_node"] == 1, environment
        names = " ".join(variables for _, _, variables in found.entries)
        assert "=" in names, environment
        for name in ("PET_NNODES", "PET_NODE_RANK"):
            assert not environment.get(name) or f"{name}={environment[name]}" in names, environment


def test_nothing_to_recognise():
    job = "SLURM_JOB_ID=1 SLURM_NNODES=1"
    step = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_NODELIST=n1"
    sky = "SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.4"
    for text in ("", job, "PMI_SIZE=1 PMI_RANK=0", f"{job} {step}", "RANK=0 WORLD_SIZE=1", sky):
        assert recognise(variables(text)) is None, text
    for word in ("auto", "gpu", "cpu"):
        found = recognise(PET | {"PET_NPROC_PER_NODE": word}).entries
        assert "launch.nproc_per_node" not in [key for key, *_ in found], word
    assert recognise(PLAIN | {"DRIVETRAIN_CONFIG": "config.yaml"}) is None


def test_half_set_and_contradictory_variables():
    for environment, text in (
        ({"RANK": "0"}, "expected the variables RANK, WORLD_SIZE, found RANK alone; set"),
        (PLAIN | {"MASTER_ADDR": ""}, "set MASTER_ADDR, or give --nnodes"),
        (PLAIN | {"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict each other"),
        (PLAIN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD"),
        (PLAIN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun has started this .* rank 3 of 4; give"),
        (PET | {"PET_MASTER_ADDR": ""}, "expected the variables .* set PET_MASTER_ADDR, or give"),
        (PET | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 and PET_NNODES=2 contradict each other"),
        (PET | {"PET_NNODES": "two"}, "PET_NNODES: expected a whole number .* found 'two'"),
        (PET | {"PET_NNODES": "2:x"}, "PET_NNODES: expected a whole number .* found '2:x'"),
        (PET | {"PET_NNODES": "x:4"}, "PET_NNODES: expected a whole number .* found 'x:4'"),
        (PET | {"PET_MASTER_PORT": "x"}, "expected HOST:PORT"),
        (MPI | {"MASTER_ADDR": ""}, "MASTER_ADDR, found none; .*mpirun -x MASTER_ADDR="),
        (MPI | FROM_MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}, "MASTER_ADDR, found none"),
        (MPI | FROM_MPIRUN | TWO_ADDRESSES, "MASTER_ADDR, found none"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "set OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "contradict each other: expected an index from 0 to"),
        (STEP | {"SLURM_STEP_ID": ""}, "gave this job 2 nodes .* write 'srun --ntasks-per-node=1'"),
        (STEP | {"SLURM_STEP_NODELIST": "n7"}, "contradict each other"),
        (STEP | {"SLURM_STEP_NODELIST": "n[7"}, "expected a list of nodes"),
        (STEP | {"SLURM_NODEID": "2"}, "contradict each other"),
        (DEVICES | {"SLURM_STEP_TASKS_PER_NODE": "x"}, "expected the tasks of node 1"),
        (DEVICES | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "expected the tasks of node 1"),
        (PLAIN | {"WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number of at least 1, found"),
        (SKY | {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NODE_IPS with 2 addresses contradict"),
    ):
        with pytest.raises(ConfigError, match=text) as raised:
            recognise(environment)
        assert "\n" not in str(raised.value), environment


def test_lists_of_nodes():
    for text, names in (
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu-[08-10]-ib,x", ["gpu-08-ib", "gpu-09-ib", "gpu-10-ib", "x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ):
        assert node_names(text) == names, text
    assert [tasks_on("4(x2),3", node) for node in range(3)] == [4, 4, 3]


def test_a_file_that_says_otherwise_is_refused():
    origin = ValueOrigin("file", "run.yaml:2")
    file = Layer({"launch": {"nnodes": 4}}, {"launch.nnodes": origin})
    with pytest.raises(ConfigError, match=r"run.yaml:2: launch.nnodes: 4 contradicts 2 from SLURM"):
        check_agreement(recognise(STEP), file)
    for step in (STEP, PET):  # ranks of a host are not refused
        check_agreement(recognise(step), Layer({"launch": {"nnodes": 2, "nproc_per_node": 3}}, {}))


def test_fewest_and_most_hosts_of_torchruns_variables():
    entries = {key: value for key, value, _ in recognise(PET | {"PET_NNODES": "1:4"}).entries}
    assert (entries["launch.min_nnodes"], entries["launch.nnodes"]) == (1, 4)
    same = recognise(PET | {"PET_NNODES": "2:2"}).entries
    assert not [key for key, _, _ in same if key == "launch.min_nnodes"]


def test_the_fewest_and_the_most_hosts_of_the_command_line(command):
    place = ("--rdzv-endpoint", "h:1", "--nproc-per-node", "2", "--dry-run")
    out = command.output("launch", "--nnodes", "2:4", *place, "--strategy", "toy")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert {"launch.nnodes 4 --nnodes 2:4", "launch.min_nnodes 2 --nnodes 2:4"} <= set(lines)
    for options, text in (
        (("--nnodes", "4:2"), "launch.min_nnodes: expected at most nnodes, 2, found 4"),
        (("--nnodes", "0:2"), "launch.min_nnodes: expected at least 1, found 0"),
        (("--nnodes", "x:2"), "launch.min_nnodes: expected"),
        (
            ("--nnodes", "1:2", "--set", "strategy=megatron", "--set", "strategy.tp=4"),
            "launch.min_nnodes: the run could not go on with 1 hosts of 2 ranks",
        ),
    ):
        err = command.error("launch", *options, *place)
        assert text in " ".join(err.split()), err


def test_dry_run_shows_what_was_recognised_and_from_which_variable(command, monkeypatch):
    for name, text in PET.items():
        monkeypatch.setenv(name, text)
    out = command.output("launch", "--strategy", "toy", "--dry-run")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "launch.nnodes 2 torchrun's variables: PET_NNODES=2" in lines
    assert "launch.nproc_per_node 4 torchrun's variables: PET_NPROC_PER_NODE=4" in lines
    assert any(line.startswith("Mesh: dp=8 (2 x 4 ranks)") for line in lines)
    out = command.output("launch", "--strategy", "toy", "--dry-run", "--standalone")
    assert "PET" not in out
    monkeypatch.setenv("PET_NODE_RANK", "2")
    command.error("launch", "--strategy", "toy", "--dry-run", lines=1)


def test_one_process_per_rank_refuses_another_number(command, monkeypatch):
    for name, text in MPI.items():
        monkeypatch.setenv(name, text)
    err = command.error("launch", "--strategy", "toy", "--dry-run", "--nproc-per-node", "2")
    assert "expected 1 under Open MPI, where each process is one rank, found 2; leave the" in err


MEET = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "DRIVETRAIN_SECRET")
print(dist.get_rank(), value.item(), *(os.environ.get(name, "-") for name in names))
dist.barrier()
"""


def one_per_host(index, port):
    return variables(
        f"PET_NNODES=2 PET_NODE_RANK={index} PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=127.0.0.1 "
        f"PET_MASTER_PORT={port}"
    )


def one_per_device(index, port):
    return variables(
        f"OMPI_COMM_WORLD_RANK={index} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={index} "
        f"OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variables", "places"),
    [(one_per_host, ("0 1 0", "0 1 1")), (one_per_device, ("0 2 0", "1 2 0"))],
)
def test_launchers_meet_without_flags(sandbox, variables, places, port):
    script = sandbox.script(MEET)
    hosts = [
        sandbox.start(
            "launch", "--strategy", "toy", "--log-dir", f"logs-{index}", script,
            env=variables(index, port) | {"XDG_CONFIG_HOME": str(sandbox.folder / "home")},
        )
        for index in range(2)
    ]  # fmt: skip
    done = [host.communicate() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], done
    for rank, place in enumerate(places):
        log = sandbox.folder / f"logs-{rank}" / "attempt-0" / f"rank-{rank}.stdout.log"
        assert log.read_text() == f"{rank} 3.0 {place} -\n"
    secret = sandbox.folder / "home" / "drivetrain" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_secret_that_others_can_read_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in (SECRET_VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    first = shared_secret()
    assert shared_secret() == first
    for mode in (0o644, 0o640):
        (tmp_path / "drivetrain" / "secret").chmod(mode)
        with pytest.raises(ConfigError, match=f"readable by you alone, found mode {mode:o}"):
            shared_secret()
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError, match="at least 16 characters, found 5; set DRIVETRAIN_SECRET"):
        shared_secret()
    monkeypatch.setenv(SECRET_VARIABLE, "")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="DRIVETRAIN_SECRET_FILE: cannot read"):
        shared_secret()
