"""Runs the examples of Hugging Face Accelerate under drivetrain, and prints which end well.

::

    python benchmarks/accelerate_examples.py accelerate/examples
    python benchmarks/accelerate_examples.py accelerate/examples --ranks 1 2 --strategy ddp zero3
    python benchmarks/accelerate_examples.py accelerate/examples --only local_sgd.py --show

The folder is ``examples`` of a checkout of Accelerate. Each script runs in two ways: as it is,
under ``drivetrain launch --as-accelerate``, and with the import of ``accelerate`` changed to
``drivetrain``. Its data, models and metrics are those of ``standins`` beside this file: nothing
is downloaded. The command ends with status 1 if a script fails.

Scripts that start other machines, and scripts for the engines DeepSpeed and Megatron-LM themselves,
are listed and left out.
"""

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STANDINS = Path(__file__).resolve().parent / "standins"
IMPORT = re.compile(r"from accelerate(?!\.test_utils)(\.\w+)* import")
LIMIT_S = 240
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
        vision = [str(STANDINS / "vision")] if "cv_" in script.name else []
        path = [str(STANDINS), *vision, os.environ.get("PYTHONPATH", "")]
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
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end after {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def error_of(output: str) -> str:
    lines = [line for line in output.splitlines() if re.search(r"\w*Error: ", line)]
    return (lines or output.splitlines() or [""])[-1].strip()[:160]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
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
    main()
