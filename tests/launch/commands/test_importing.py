"""``drivetrain config import``: files and command lines of other programs in our words."""

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from drivetrain.config.document import importer_of, importers
from drivetrain_migration.launchers import table_of
from foreign_files import FILES, LINES


@pytest.fixture
def folder(tmp_path):
    """Write every foreign file here; the disk that one of them names is here, too."""
    (tmp_path / "disk").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("/DISK", str(tmp_path / "disk")))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def imported(command, *words):
    """Import something; return the values, the whole text and the command to run."""
    code, out, err = command("config", "import", *words)
    assert code == 0, err
    run = err.strip().removeprefix("no file was written; with --output drivetrain.yaml, ")
    return yaml.safe_load(out), out, run.removeprefix("run: ")


EXPECTED = yaml.safe_load(Path(__file__).with_name("imported.yaml").read_text())


QUIET = """
aio compute_environment debug deepspeed_config_file deepspeed_multinode_launcher distributed_type
downcast_bf16 enable_cpu_affinity fsdp_auto_wrap_policy fsdp_backward_prefetch
fsdp_forward_prefetch fsdp_sync_module_states fsdp_use_orig_params fsdp_version machine_rank
main_process_port main_training_function mixed_precision num_machines nvme_path
parallelism_config_cp_size parallelism_config_dp_shard_size queue_depth rdzv_backend same_network
thread_count tpu_env tpu_use_cluster tpu_use_sudo use_cpu zero3_init_flag
"""
"""Settings that are so here without a key."""


def test_file_becomes_ours_and_launches(command, folder):
    """Every setting is in the text, unless its row carries over what is so here without a key."""
    for name in FILES:
        values, text, _ = imported(command, name)
        shown = yaml.safe_load(yaml.safe_dump(values).replace(str(folder / "disk"), "/DISK"))
        assert shown == EXPECTED[name], name
        for key in flat_names(yaml.safe_load(FILES[name].replace("\t", " "))):
            assert key in QUIET.split() or re.search(rf"\b{key}\b", text), (name, key)
        (folder / "ours.yaml").write_text(text)
        assert command("config", "check", "ours.yaml") == (0, "ok\n", ""), name
        words = ("--config", "ours.yaml", "--cpu", "--dry-run")
        assert "Mesh:" in command.output("launch", *words), name


def flat_names(values):
    for key, value in values.items():
        if isinstance(value, dict) and key not in {"optimizer", "scheduler", "mpirun_config"}:
            yield from flat_names(value)
        else:
            yield key


def test_settings_without_a_key_say_what_they_do_and_the_way_to_have_it(command, folder):
    _, text, _ = imported(command, "zero_3.yaml")
    assert (
        "#   deepspeed_config.gradient_clipping: 1.0: clips the norm of gradients in every step; "
        "here: accelerator.clip_grad_norm_(model.parameters(), VALUE) in the loop\n" in text
    )
    assert "name: zero3  # deepspeed_config.zero_stage: 3\n" in text
    _, text, _ = imported(command, "zero_2_cpu.json")
    assert "#   bf16.enabled: auto: taken from the script there; here: precision: bf16" in text
    _, text, _ = imported(command, "ddp.yaml")
    assert "gpu_ids: 0,1: which devices; here: CUDA_VISIBLE_DEVICES=0,1 drivetrain launch" in text


RUNS = {
    "torchrun": ({"nproc_per_node": 2}, "ddp", "train.py --lr 1e-4"),
    "torchrun of hosts": (
        {"nnodes": 2, "nproc_per_node": "auto", "rdzv_endpoint": "10.0.0.1:29400"},
        "ddp",
        "train.py",
    ),
    "accelerate": ({"nproc_per_node": 4}, "zero3", "train.py --epochs 3"),
    "accelerate with flags": ({"nproc_per_node": 2}, "fsdp", "-m package.train"),
    "deepspeed": ({"nproc_per_node": 2}, "zero1", "train.py x"),
    "torchrun of a Trainer": ({"nproc_per_node": 2}, "zero3", "train.py"),
}


def test_command_line_becomes_a_file_and_a_command(command, folder):
    for name in LINES:
        values, text, run = imported(command, *shlex.split(LINES[name]))
        launch, strategy, script = RUNS[name]
        assert values.get("launch") == launch, name
        assert values.get("strategy", {"name": "ddp"})["name"] == strategy, name
        if launch.get("nnodes"):
            said = "run on each of the 2 hosts, with its own --node-rank: drivetrain"
            assert run.startswith(said), name
            script = f"--node-rank 0 {script}"
        assert run.endswith(f"drivetrain launch --config drivetrain.yaml {script}"), name
        (folder / "ours.yaml").write_text(text)
        assert command("config", "check", "ours.yaml")[0] == 0, name
    line = "torchrun --nnodes 1:4 --nproc_per_node 2 --master_addr fe80::1 train.py"
    values, _, _ = imported(command, *shlex.split(line))
    several = {"min_nnodes": 1, "nnodes": 4, "nproc_per_node": 2}
    assert values["launch"] == {**several, "rdzv_endpoint": "[fe80::1]:29500"}
    values, _, _ = imported(command, *shlex.split(LINES["accelerate"]))
    # The options win over the file.
    assert (values["precision"], values["dtypes"]) == ("fp16", {"param": "fp16"})
    assert values["accumulation"] == 4


def test_elements_of_a_bucket_are_bytes_of_its_dtype(command, folder):
    for enabled, mib in ((True, 2.0), (False, 4.0)):
        zero = {"stage": 2, "reduce_bucket_size": 1 << 20, "offload_optimizer": {"device": "none"}}
        facts = {"bf16": {"enabled": enabled}, "zero_optimization": zero}
        (folder / "bucket.json").write_text(json.dumps(facts))
        values, _, _ = imported(command, "bucket.json")
        assert values["strategy"] == {"name": "zero2", "bucket_mib": mib}, enabled
    fsdp = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 0}
    facts = {"distributed_type": "FSDP", "mixed_precision": "fp8", "fsdp_config": fsdp}
    (folder / "fp8.json").write_text(json.dumps(facts))
    values, _, _ = imported(command, "fp8.json")
    assert (values["precision"], values["dtypes"]) == ("fp8", {"param": "bf16"})
    assert values["strategy"]["unit_from"] == 1, "the least"
    (folder / "whole.json").write_text('{"bf16": {"enabled": true}}')
    values, _, _ = imported(command, "whole.json")
    assert values == {"strategy": {"name": "ddp"}, "precision": "bf16"}


def test_shell_script_is_read_for_its_call(command, folder):
    (folder / "run.sh").write_text(
        "#!/bin/bash\nexport NCCL_DEBUG=INFO  # a comment\n"
        'srun torchrun --nproc_per_node 2 \\\n  train.py "$@"\n'
    )
    values, _, run = imported(command, "run.sh")
    assert values == {"launch": {"nproc_per_node": 2}}
    assert run == "drivetrain launch --config drivetrain.yaml train.py $@"


def test_output_is_written_and_an_old_file_left_alone(command, folder):
    code, out, err = command("config", "import", "--output", "ours.yaml", "zero_1.json")
    assert (code, err) == (0, "")
    assert out == "wrote ours.yaml\nrun: drivetrain launch --config ours.yaml train.py\n"
    assert (folder / "ours.yaml").read_text().startswith("# Imported from zero_1.json.\nstrategy:")
    err = command.error("config", "import", "--output", "ours.yaml", "zero_1.json")
    assert "ours.yaml exists" in err


def test_output_may_follow_the_file(command, folder):
    for words in (["--output", "ours.yaml"], ["--output=ours.yaml"]):
        command.output("config", "import", "zero_1.json", *words)
        (folder / "ours.yaml").unlink()
    err = command.error("config", "import", "zero_1.json", "ddp.yaml")
    assert "found more after the file: ddp.yaml" in err


def test_a_file_is_foreign_by_the_keys_that_are_not_ours():
    assert importer_of({"checkpoint": {}, "seed": 3}) is None
    assert "DeepSpeed" in importer_of({"checkpoint": {}, "train_batch_size": 8}).title
    for ours in ("strategy", "launch"):  # in which words of other programs are mistakes
        assert importer_of({ours: {}, "gradient_accumulation_steps": 4, "bf16": True}) is None


def test_foreign_file_in_place_of_ours_is_one_line_that_says_so(command, folder):
    for name in ("zero_3_nvme.json", "fsdp_1.yaml"):
        for how in (("config", "check"), ("launch", "--dry-run", "--config")):
            code, _, err = command(*how, name)
            title = "a DeepSpeed" if name.endswith("json") else "an Accelerate"
            assert code == 2, name
            assert err == (
                f"error: {name}: expected a configuration of drivetrain, found {title} "
                f"configuration; translate it once with: drivetrain config import {name} --output "
                "drivetrain.yaml\n"
            ), name


def test_bad_file_is_one_clear_line(command, folder):
    for text, message in (
        ("distributed_type: NO\nmixed_precison: bf16\n", ":2: unknown key mixed_precison; did you"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n", ":3: unknown key"),
        ("distributed_type: XLA\n", ":1: distributed_type: expected NO, MULTI_GPU, "),
        ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 3\n", ":3: num_pro"),
        ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n", ":2: num_machines: 2"),
        ('{"bf16": {"enabled": true},\n"fp16": {"enabled": true}}', "contradict each other; keep"),
        (
            '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
            "offload_param.device: cpu and stage 2 contradict each other",
        ),
        ('{"zero_optimization": {"stage": 4}}', "stage: expected a stage from 0 to 3, found 4"),
        (
            '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}',
            "needs a directory on a disk, found none",
        ),
        (
            '{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}',
            "train_batch_size: 30 contradicts train_micro_batch_size_per_gpu x",
        ),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
            "  deepspeed_config_file: zero_1.json\n",
            ":2: mixed_precision: bf16 contradicts fp16 in the file of DeepSpeed",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
            "  deepspeed_config_file: zero_1.json\n",
            "zero_stage: 2 contradict each other; keep the file",
        ),
        ("distributed_type: FOO\n", ":1: distributed_type: expected NO, MULTI_GPU, MULTI_CPU, "),
        ('{"fp16": true, "zero_optimization": {}}', "fp16: expected a section with keys such as "),
        ("", "bad.yaml: expected an Accelerate configuration, a DeepSpeed configuration, found an"),
        ("strategy: ddp\n", "is a configuration of drivetrain already"),
        ("lr: 1\n", "expected an Accelerate configuration, a DeepSpeed configuration"),
    ):
        (folder / "bad.yaml").write_text(text)
        err = command.error("config", "import", "bad.yaml", lines=1)
        assert message in err, text


def test_bad_command_line_is_one_clear_line(command, folder):
    for line, message in (
        ("torchrun --nproc 2 train.py", "torchrun: unknown option --nproc"),
        ("torchrun --nproc_per_node", "expected a value after --nproc_per_node, found none"),
        ("torchrun --nnodes $N train.py", "expected an integer of at least 1, found '$N'"),
        ("deepspeed --num_nodes 2 train.py", "num_nodes: 2 needs the address of host 0"),
        ("python train.py", "expected a file, or a call of"),
    ):
        err = command.error("config", "import", *shlex.split(line), lines=1)
        assert message in err.replace("a number", "an integer of at least 1"), line


def test_option_of_another_launcher_is_answered_with_its_counterpart(command):
    for arguments, hint in (
        (
            ("--num_processes", "2"),
            "no option --num_processes; it is one of accelerate launch; "
            "here: launch.nproc_per_node, --nproc-per-node: those of each host",
        ),
        (("--config_file", "a.yaml"), "here: --config with a file of drivetrain config import"),
        (("--multi_gpu",), "here: nothing: all accelerators take part"),
        (("--use_deepspeed",), "here: --strategy zero1, zero2 or zero3"),
        (("--master_addr=10.0.0.1",), "no option --master_addr; it is one of "),
        (("--main_process_port", "1"), "--rdzv-endpoint HOST:PORT"),
        (("--rdzv-backend", "c10d"), "no option --rdzv-backend; it is one of "),
        (("--nproc_per_node=gpu",), "--nproc-per-node gpu: take here auto"),
        (("--dynamo_backend", "inductor"), "here: compile: blocks, or torch.compile of the model"),
        (("--tpu",), "accelerate launch; here: no TPUs"),
        (("--deepspeed", "a.json"), "here: --config with a file of drivetrain config import"),
        (("--num_gpus", "2"), "it is one of deepspeed; here: --nproc-per-node"),
    ):
        err = command.error("launch", *arguments, "train.py")
        assert hint in " ".join(err.split()), arguments


def test_options_that_mean_the_same_are_taken(command, folder):
    words = ("--standalone", "--num_machines", "1", "--machine_rank", "0", "--cpu", "--dry-run")
    assert command("launch", *words)[0] == 0
    words = ("--standalone", "--nnodes", "2", "--rdzv_endpoint", "a:1", "train.py")
    err = command.error("launch", *words)
    assert "--standalone is for one host, found launch.nnodes: 2" in err


def test_every_row_has_a_counterpart_and_the_arguments_of_its_converter():
    assert all(counterpart for each in importers() for counterpart in each.flags.values())
    for table in map(table_of, ("accelerate", "deepspeed", "torchrun")):
        for row in (*table.settings, *table.options):
            inspect.signature(row.convert).bind(None, None, *row.arguments)
