"""Runs Accelerate's own tests and examples with the real package and over drivetrain."""

import argparse
import fnmatch
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

from programs import run_program

# --- suite ---


HERE = Path(__file__).resolve()
SUITE_STANDINS = HERE.parent / "standins"
RELATIVE = re.compile(r"^(\s*)from \.\.(\w)", re.MULTILINE)
"""Imports of the package around test_utils, whose copies stand alone."""

SUITE_LIMIT_S = 300
"""Seconds for one file of tests, or one start of two ranks."""

COLLECTIVE_S = 20
"""Seconds that a rank waits for another one that has failed."""

FILES = (
    *("test_accelerator", "test_compile", "test_cpu", "test_data_loader", "test_dataclasses"),
    *("test_grad_sync", "test_hooks", "test_kwargs_handlers", "test_logging"),
    *("test_memory_utils", "test_metrics", "test_optimizer", "test_scheduler"),
    *("test_state_checkpointing", "test_tracking", "test_utils"),
)
"""Files of tests that concern training in one process."""

_PAIRS = ("False, False", "True, False", "False, True", "True, True")
_HOOKS = (
    *("'no', 'no', {}", "'fp16', 'no', {}", "'bf16', 'no', {}", "'power_sgd', 'no', {}"),
    *("'power_sgd', 'fp16', {}", "'power_sgd', 'bf16', {}"),
    "'power_sgd', 'no', {'matrix_approximation_rank': 2}",
    *("'batched_power_sgd', 'no', {}", "'batched_power_sgd', 'fp16', {}"),
    "'batched_power_sgd', 'bf16', {}",
)
_LOADER = "test_data_loader(DataLoader(DummyDataset(), {}, num_workers=NUM_WORKERS), Accelerator())"
_SAMPLER = "BatchSampler(RandomSampler(DummyDataset()), batch_size=BATCH_SIZE, drop_last=False)"
FUNCTIONS = {
    "test_script": (
        *("init_state_check()", "process_execution_check()", "test_split_between_processes_list()"),
        "test_split_between_processes_dataset(__import__('datasets').Dataset)",
        *("test_split_between_processes_nested_dict()", "test_split_between_processes_tensor()"),
        *("test_split_between_processes_evenly()", "rng_sync_check()", "dl_preparation_check()"),
        *("central_dl_preparation_check()", "custom_sampler_check()", "check_seedable_sampler()"),
        "check_seedable_sampler_with_data_seed()",
        "check_seedable_sampler_in_batch_sampler_shard()",
        *(f"training_check(use_seedable_sampler={flag})" for flag in (False, True)),
        *("test_trigger()", "test_reinstantiated_state()"),
    ),
    "test_ops": (
        *("test_gather(PartialState())", "test_gather_object(PartialState())"),
        *("test_gather_non_contiguous(PartialState())", "test_broadcast(PartialState())"),
        *("test_pad_across_processes(PartialState())", "test_reduce_sum(PartialState())"),
        *("test_reduce_mean(PartialState())", "test_reduce_max(PartialState())"),
        *("test_op_checker(PartialState())", "test_copy_tensor_to_devices(PartialState())"),
    ),
    "test_sync": (
        *("test_dataloader_break()", "test_noop_sync(Accelerator())"),
        *("test_distributed_sync(Accelerator())",),
        *("test_distributed_sync_multiple_fwd(Accelerator())",),
        *(f"test_gradient_accumulation({pair}, {each})" for pair in _PAIRS for each in (0, 1)),
        *(
            f"test_gradient_accumulation_with_opt_and_scheduler({pair}, {each})"
            for pair in _PAIRS
            for each in (0, 1)
        ),
    ),
    "test_distributed_data_loop": (
        *("test_default_ensures_even_batch_sizes()", "test_can_disable_even_batches()"),
        *("test_can_join_uneven_inputs()", "test_join_can_override_even_batches()"),
        "test_join_can_override_for_mixed_type_dataloaders()",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches()",
        "test_pickle_accelerator()",
        *(_LOADER.format(f"shuffle={flag}, batch_size=BATCH_SIZE") for flag in (False, True)),
        _LOADER.format(f"batch_sampler={_SAMPLER}"),
        _LOADER.format(f"sampler={_SAMPLER}, batch_size=None, collate_fn=default_collate"),
        *("test_stateful_dataloader(Accelerator())",),
        *("test_stateful_dataloader_save_state(Accelerator())",),
    ),
    "test_ddp_comm_hook": tuple(
        "test_ddp_comm_hook(DDPCommunicationHookType({}), DDPCommunicationHookType({}), {})".format(
            *hook.split(", ", 2)
        )
        for hook in _HOOKS
    ),
    "external_deps.test_metrics": (
        *(
            "test_torch_metrics(Accelerator(dataloader_config=DataLoaderConfiguration("
            f"split_batches={pair.split(', ')[0]}, dispatch_batches={pair.split(', ')[1]})), 99)"
            for pair in _PAIRS
        ),
        *("test_torch_metrics(Accelerator(), 512)", "test_gather_for_metrics_drop_last()"),
        "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset()",
        "test_gather_for_metrics_with_iterable_dataset()",
        *(f"test_mrpc({pair})" for pair in _PAIRS),
    ),
    "external_deps.test_checkpointing": (
        "script('--num_epochs=2', '--partial_train_epoch=1', f'--output_dir={folder}')",
        "script('--num_epochs=2', f'--resume_from_checkpoint={folder}/epoch_0',"
        " f'--output_dir={folder}')",
    ),
    "external_deps.test_performance": ("script('--num_epochs=2', f'--output_dir={folder}')",),
}
"""Calls in the scripts of accelerate.test_utils that concern several processes. ``script`` is the
whole script with a command line, ``folder`` a folder that the calls share."""

Outcomes = dict[str, str]
"""Test to ``passed``, ``skipped``, or the last line of its error."""


# --- in the processes under test ---


def see_copies(folder: Path) -> None:
    """Let ``accelerate.test_utils`` be the copies, modules outside of site-packages."""
    importlib.import_module("accelerate").__path__.insert(0, str(folder))


def run_file(file: Path, report: Path) -> None:
    import pytest

    # Rewritten assertions would keep the files from being modules of the user.
    options = ("--assert=plain", "-q", "-p", "no:cacheprovider", "--timeout=120")
    pytest.main([str(file), *options, f"--junitxml={report}"])


def run_functions(script: str, calls: Iterable[str], report: Path) -> None:
    """Make calls in turn, and end with the first that fails: other ranks may wait in it."""
    module = importlib.import_module(f"accelerate.test_utils.scripts.{script}")
    folder = Path(f"{report}.folder")
    folder.mkdir(exist_ok=True)
    names = vars(module) | {"folder": folder, "script": lambda *words: run_script(module, words)}
    # The scripts' main functions make one before all others.
    importlib.import_module("accelerate").Accelerator()
    ignore_device_ids()
    rank = os.environ.get("RANK", "0")
    with Path(f"{report}.{rank}").open("a", encoding="utf-8") as file:
        for call in calls:
            try:
                eval(call, names)
                outcome = "passed"
            except BaseException as error:
                traceback.print_exc()
                outcome = one_line(error)
            file.write(json.dumps([call, outcome]) + "\n")
            file.flush()
            if outcome != "passed":
                os._exit(1)


def ignore_device_ids() -> None:
    """Let torch's own DDP take ``device_ids`` on CPUs, where scripts for GPUs name them, too."""
    from torch.nn.parallel import DistributedDataParallel

    make = DistributedDataParallel.__init__
    without = {"device_ids": None, "output_device": None}
    DistributedDataParallel.__init__ = lambda *args, **options: make(*args, **options | without)


def run_script(module: ModuleType, words: Iterable[str]) -> None:
    sys.argv = [str(module.__file__), *words]
    module.main()


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


# --- the driver ---


class Suite:
    """Accelerate's tests in a folder of their own, and what runs them."""

    def __init__(self, source: Path, work: Path, strategy: str, show: bool) -> None:
        self.work, self.strategy, self.show = work, strategy, show
        shutil.copytree(source / "tests", work / "tests")
        shutil.copytree(source / "src/accelerate/test_utils", work / "copies/test_utils")
        for file in (work / "copies/test_utils").glob("*.py"):
            text = file.read_text(encoding="utf-8")
            file.write_text(RELATIVE.sub(r"\1from accelerate.\2", text), encoding="utf-8")
        make = "import models, pathlib; models.write_models(pathlib.Path())"
        subprocess.run(
            [sys.executable, "-c", make],
            cwd=work,
            env=_environment(),
            capture_output=True,
            check=True,
        )

    def file(self, name: str, real: bool) -> Outcomes:
        report = self.work / f"{name}.{real}.xml"
        report.unlink(missing_ok=True)
        words = ["file", self.work / "tests" / f"{name}.py", report]
        tail = self.run(words, real, ranks=1)
        if not report.exists():
            return {f"{name}.py": tail}
        return dict(read_report(report))

    def functions(self, script: str, calls: Iterable[str], real: bool, ranks: int) -> Outcomes:
        """Make all calls, with a new start after each that fails."""
        left, found = list(calls), {}
        while left:
            report = self.work / f"functions.{real}"
            for rank in range(ranks):
                Path(f"{report}.{rank}").unlink(missing_ok=True)
            tail = self.run(["functions", script, report, *left], real, ranks)
            ended = [read_lines(Path(f"{report}.{rank}")) for rank in range(ranks)]
            tried = 0
            for call in left:
                outcomes = {each.get(call, "") for each in ended}
                if outcomes == {"passed"}:
                    found[f"{script}::{call}"] = "passed"
                    tried += 1
                    continue
                errors = sorted(outcomes - {"passed", ""})
                found[f"{script}::{call}"] = errors[0] if errors else tail
                tried += 1
                break
            left = left[tried:]
        return found

    def run(self, words: Iterable[object], real: bool, ranks: int) -> str:
        """Start the processes, and return the last line that they wrote to stderr."""
        start: dict[tuple[bool, bool], list[str]] = {
            (True, False): [],
            (False, False): ["-m", "drivetrain.compat"],
            (True, True): ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
            (False, True): [
                *("-m", "drivetrain_launch", "launch", "--cpu", "--as-accelerate"),
                *(f"--nproc-per-node={ranks}", f"--set=launch.timeout_s={COLLECTIVE_S}"),
                f"--strategy={self.strategy}",
            ],
        }
        mode = [str(HERE), "suite", "--inside", "real" if real else str(self.work / "copies")]
        try:
            done = subprocess.run(
                [sys.executable, *start[real, ranks > 1], *mode, *map(str, words)],
                cwd=self.work,
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=SUITE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"TimeoutExpired: {SUITE_LIMIT_S} s"
        if self.show:
            print(done.stdout[-20000:], done.stderr[-20000:])
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [""]
        return f"status {done.returncode}: {lines[-1]}"[:300]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(SUITE_STANDINS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        # Without this line Accelerate takes each of two processes on CPUs for the only one.
        "ACCELERATE_USE_CPU": "true",
    }


def read_report(report: Path) -> Iterable[tuple[str, str]]:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            yield name, (problem.get("message") or "").strip().replace("\n", " ")[:300]
        else:
            yield name, "passed" if case.find("skipped") is None else "skipped"


def read_lines(file: Path) -> Outcomes:
    if not file.exists():
        return {}
    return dict(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def reason_for(test: str, ranks: int, strategy: str, reasons: list[Mapping[str, object]]) -> str:
    """Return the reason why a test differs on purpose; the empty text for none."""
    for reason in reasons:
        if strategy not in reason.get("strategies", [strategy]):  # type: ignore[operator]
            continue
        if ranks not in reason.get("ranks", [ranks]):  # type: ignore[operator]
            continue
        if any(fnmatch.fnmatchcase(test, str(each)) for each in reason["tests"]):  # type: ignore[attr-defined]
            return str(reason["why"])
    return ""


def compare(ours: Outcomes, real: Outcomes, ranks: int, strategy: str) -> bool:
    """Print a line for each test that differs, and the sum; return whether all is explained."""
    with HERE.with_name("accelerate_differences.toml").open("rb") as file:
        reasons = tomllib.load(file)["difference"]
    sums = dict.fromkeys(
        ("same", "on purpose", "unexplained", "better", "fails there, too", "reason for nothing"), 0
    )
    for test in sorted(ours):
        here, there = ours.get(test, "not found"), real.get(test, "not found")
        why = reason_for(test, ranks, strategy, reasons)
        if why and here == there == "passed":
            kind = "reason for nothing"
        elif there == "skipped" or here == there == "passed":
            kind = "same" if there == "passed" else ""
        elif there != "passed":
            kind = "better" if here == "passed" else "fails there, too"
        else:
            kind = "on purpose" if why else "unexplained"
        if kind:
            sums[kind] += 1
        if kind in {"on purpose", "unexplained", "reason for nothing"}:
            print(f"  {kind}: {test}\n      {why or here}")
    print(", ".join(f"{name} {count}" for name, count in sums.items()))
    return not sums["unexplained"] and not sums["reason for nothing"]


def suite_main() -> None:
    """Runs the tests of Hugging Face Accelerate over drivetrain, and tells which differ, and why.

    ::

        pip download --no-binary :all: --no-deps accelerate==1.15.0
        tar xzf accelerate-1.15.0.tar.gz
        python benchmarks/accelerate_programs.py suite accelerate-1.15.0  # one process
        python benchmarks/accelerate_programs.py suite accelerate-1.15.0 --ranks 2  # of scripts
        python benchmarks/accelerate_programs.py suite accelerate-1.15.0 --ranks 2 --strategy zero2
        python benchmarks/accelerate_programs.py suite accelerate-1.15.0 --only test_scheduler

    The folder is Accelerate's source distribution of the installed version. Its files see
    drivetrain as scripts under ``--as-accelerate`` do; nothing in them is changed. Each test runs
    with the real package, too (``--reference`` shows that half alone): a test that fails there says
    nothing. ``accelerate_differences.toml`` beside this file holds a reason for every test that
    passes there and differs here on purpose. The command ends with status 1 if a test differs
    without a reason, or has a reason and passes.

    Needs the packages ``accelerate`` and ``parameterized``. ``standins`` beside this file takes the
    place of ``datasets``, ``evaluate`` and downloads.
    """
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=str(suite_main.__doc__), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Accelerate's unpacked source distribution")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--only", default="*", help="pattern of files")
    parser.add_argument("--calls", default="*", help="pattern of calls in scripts")
    parser.add_argument("--reference", action="store_true", help="the real package alone")
    parser.add_argument("--real", type=Path, help="file with the real package's outcomes")
    parser.add_argument("--show", action="store_true", help="what the tests print")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(arguments.source, Path(folder), arguments.strategy, arguments.show)
        real = stored(arguments.real) or all_outcomes(suite, arguments, real=True)
        if arguments.real and not arguments.real.exists():
            arguments.real.write_text(json.dumps(real, indent=1), encoding="utf-8")
        if arguments.reference:
            print(json.dumps(real, indent=1))
            return
        ours = all_outcomes(suite, arguments, real=False)
    sys.exit(not compare(ours, real, arguments.ranks, arguments.strategy))


def stored(file: Path | None) -> Outcomes:
    return json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}


def all_outcomes(suite: Suite, arguments: argparse.Namespace, real: bool) -> Outcomes:
    found: Outcomes = {}
    names = FILES if arguments.ranks == 1 else FUNCTIONS
    for name in fnmatch.filter(names, arguments.only):
        if arguments.ranks == 1:
            outcomes = suite.file(name, real)
        else:
            calls = [each for each in FUNCTIONS[name] if fnmatch.fnmatchcase(each, arguments.calls)]
            outcomes = suite.functions(name, calls, real, arguments.ranks)
        found |= outcomes
        passed = sum(outcome == "passed" for outcome in outcomes.values())
        print(f"{'accelerate' if real else 'drivetrain'} {name}: {passed} of {len(outcomes)}")
        sys.stdout.flush()
    return found


def inside(words: list[str]) -> None:
    copies, mode, subject, report, *calls = words
    if copies != "real":
        see_copies(Path(copies))
    if mode == "file":
        run_file(Path(subject), Path(report))
    else:
        run_functions(subject, calls, Path(report))


# --- examples ---


EXAMPLES_STANDINS = Path(__file__).resolve().parent / "standins"
IMPORT = re.compile(r"from accelerate(?!\.test_utils)(\.\w+)* import")
EXAMPLES_LIMIT_S = 240
"""Seconds for one run."""

CHECKPOINTS = ("--checkpointing_steps", "epoch", "--output_dir", "checkpoints")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "nlp_example.py": (),
    "cv_example.py": ("--data_dir", "images"),
    "complete_nlp_example.py": (*CHECKPOINTS, "--with_tracking"),
    "complete_cv_example.py": ("--data_dir", "images", *CHECKPOINTS, "--with_tracking"),
    "by_feature/automatic_gradient_accumulation.py": (),
    "by_feature/checkpointing.py": CHECKPOINTS,
    "by_feature/cross_validation.py": ("--num_folds", "2"),
    "by_feature/ddp_comm_hook.py": (
        *("--ddp_comm_hook", "power_sgd", "--ddp_comm_wrapper", "fp16"),
    ),
    "by_feature/deepspeed_with_config_support.py": (
        *("--dataset_name", "Salesforce/wikitext", "--model_name_or_path"),
        *("HuggingFaceTB/SmolLM-360M", "--block_size", "16", "--num_train_epochs", "2"),
        *("--output_dir", "run", "--checkpointing_steps", "epoch", "--load_best_model"),
    ),
    "by_feature/early_stopping.py": (),
    "by_feature/gradient_accumulation.py": ("--gradient_accumulation_steps", "2"),
    "by_feature/gradient_accumulation_for_autoregressive_models.py": (
        *("--gradient_accumulation_steps", "4"),
    ),
    "by_feature/local_sgd.py": ("--local_sgd_steps", "2"),
    "by_feature/memory.py": (),
    "by_feature/multi_process_metrics.py": (),
    "by_feature/profiler.py": ("--cpu",),
    "by_feature/schedule_free.py": (),
    "by_feature/megatron_lm_gpt_pretraining.py": (
        *("--dataset_name", "Salesforce/wikitext", "--model_name_or_path"),
        *("HuggingFaceTB/SmolLM-360M", "--block_size", "16", "--num_train_epochs", "2"),
        *("--output_dir", "run", "--checkpointing_steps", "epoch"),
    ),
    "by_feature/tracking.py": ("--with_tracking",),
    "config_yaml_templates/run_me.py": (),
}
"""Command line of each script."""

STRATEGIES = {
    "by_feature/ddp_comm_hook.py": {"ddp"},
    "by_feature/local_sgd.py": {"ddp"},
    # Saves the model without collecting its parameters first.
    "by_feature/megatron_lm_gpt_pretraining.py": {"ddp", "zero1", "zero2"},
}
"""Scripts that only mean something under these."""

AS_IT_IS = {
    "by_feature/deepspeed_with_config_support.py",
    "by_feature/megatron_lm_gpt_pretraining.py",
}
"""Scripts whose imports have no counterpart in ``drivetrain`` itself."""

LEFT_OUT = {
    "by_feature/fsdp_with_peak_mem_tracking.py": "asks torch for the memory of a GPU",
    "multigpu_remote_launcher.py": "starts other machines",
}


def run(script: Path, arguments: list[str], way: str, ranks: int, strategy: str) -> tuple[int, str]:
    launch = ["-m", "drivetrain_launch", "launch", "--cpu", f"--nproc-per-node={ranks}"]
    launch += [f"--strategy={strategy}"] + (["--as-accelerate"] if way == "as it is" else [])
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # transformers takes a stand-in of torchvision for the whole package, where it sees one.
        vision = [str(EXAMPLES_STANDINS / "vision")] if "cv_" in script.name else []
        path = [str(EXAMPLES_STANDINS), *vision, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        make = "import images, pathlib; images.write_images(pathlib.Path('images'))"
        if not vision:
            make = "import models, pathlib; models.write_models(pathlib.Path())"
        subprocess.run(
            [sys.executable, "-c", make], cwd=work, env=environment, capture_output=True, check=True
        )
        if way != "as it is":
            changed = IMPORT.sub("from drivetrain import", script.read_text(encoding="utf-8"))
            script = work / script.name
            script.write_text(changed, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, *launch, str(script.resolve()), *arguments],
                cwd=work,
                env=environment,
                capture_output=True,
                text=True,
                timeout=EXAMPLES_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end after {EXAMPLES_LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def error_of(output: str) -> str:
    lines = [line for line in output.splitlines() if re.search(r"\w*Error: ", line)]
    return (lines or output.splitlines() or [""])[-1].strip()[:160]


def examples_main() -> None:
    """Runs the examples of Hugging Face Accelerate under drivetrain, and prints which end well.

    ::

        python benchmarks/accelerate_programs.py examples accelerate/examples
        python benchmarks/accelerate_programs.py examples accelerate/examples --strategy zero3
        python benchmarks/accelerate_programs.py examples accelerate/examples --only local_sgd.py

    The folder is ``examples`` of a checkout of Accelerate. Each script runs in two ways: as it is,
    under ``drivetrain launch --as-accelerate``, and with the import of ``accelerate`` changed to
    ``drivetrain``. Its data, models and metrics are those of ``standins`` beside this file: nothing
    is downloaded. The command ends with status 1 if a script fails.

    Scripts that start other machines, and scripts for the engines DeepSpeed and Megatron-LM
    themselves, are listed and left out.
    """
    parser = argparse.ArgumentParser(
        description=str(examples_main.__doc__), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="examples/ of a checkout of Accelerate")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategy", nargs="+", default=["ddp"])
    parser.add_argument("--way", nargs="+", default=["as it is", "import changed"])
    parser.add_argument("--only", default="*", help="pattern of scripts")
    parser.add_argument("--show", action="store_true", help="what the scripts print")
    options = parser.parse_args()
    failures = runs = 0
    for name, arguments in ARGUMENTS.items():
        if not fnmatch.fnmatch(name, f"*{options.only}") or not (options.folder / name).exists():
            continue
        cells = []
        for strategy in options.strategy:
            if strategy not in STRATEGIES.get(name, {strategy}):
                continue
            for way in options.way:
                if name in AS_IT_IS and way != "as it is":
                    continue
                for ranks in options.ranks:
                    script = options.folder / name
                    code, output = run(script, list(arguments), way, ranks, strategy)
                    runs += 1
                    failures += bool(code)
                    outcome = error_of(output) if code else "ok"
                    cells.append(f"{strategy}, {way}, {ranks} ranks: {outcome}")
                    if options.show:
                        print(output)
        print(f"{name}\n  " + "\n  ".join(cells), flush=True)
    for name, why in LEFT_OUT.items():
        print(f"{name}\n  left out: {why}")
    print(f"{runs - failures} of {runs} runs end well")
    sys.exit(bool(failures))


if __name__ == "__main__":
    run_program({"suite": suite_main, "examples": examples_main})
