"""The command lines of torchrun and of DeepSpeed's launcher, which start ranks on each host."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.config import Layer
from drivetrain.config.foreign import Importer, Translation
from drivetrain.errors import ConfigError
from drivetrain_migration.command_line import (
    SCRIPT_OPTIONS,
    CommandLine,
    read_options,
    script_draft,
    set_hosts,
)
from drivetrain_migration.deepspeed import draft_of
from drivetrain_migration.draft import (
    Draft,
    Row,
    Setting,
    nothing,
    settings,
    to,
)
from drivetrain_migration.zero import ZERO

NODE_RANK = "each host takes its own `--node-rank`"
_ENDPOINT = "`--rdzv-endpoint HOST:PORT` of host 0"


def set_ranks(draft: Draft, setting: Setting) -> None:
    """Set the ranks of each host: a number, or a kind of device whose number counts."""
    if setting.value in {"gpu", "auto", "cpu"}:
        draft.set("launch.nproc_per_node", "auto", setting)
        if setting.value == "cpu":
            draft.set("launch.device", "cpu", setting)
    else:
        draft.set("launch.nproc_per_node", setting.whole(), setting)


def set_node_rank(draft: Draft, setting: Setting) -> None:
    """Set the index of this host; a variable of the shell is another one on each host."""
    if str(setting.value).startswith("$"):
        draft.remark(setting, "the index of this host", NODE_RANK)
    elif draft.hosts > 1:
        draft.set("launch.node_rank", setting.whole(minimum=0), setting)


def _hosts(draft: Draft, setting: Setting) -> None:
    least, _, most = str(setting.value).partition(":")
    if most:
        fewest = Setting(setting.key, least, setting.where).whole()
        draft.set("launch.min_nnodes", fewest, setting)
    draft.set("launch.nnodes", Setting(setting.key, most or least, setting.where).whole(), setting)


def _devices(draft: Draft, setting: Setting) -> None:
    draft.remark(setting, "which devices of which hosts", "`CUDA_VISIBLE_DEVICES` on each host")


TORCHRUN_ROWS: tuple[Row, ...] = (
    Row("nnodes", "number of hosts", "`--nnodes`", _hosts),
    Row("nproc_per_node", "ranks on each host", "`--nproc-per-node`", set_ranks),
    Row("node_rank", "index of this host", "`--node-rank`", set_node_rank),
    Row("rdzv_endpoint", "where hosts meet", "`--rdzv-endpoint`", nothing),
    Row("master_addr", "address of host 0", _ENDPOINT, nothing),
    Row("master_port", "port on host 0", _ENDPOINT, nothing),
    Row("max_restarts", "restarts after failures", "`--max-restarts`", to("launch.max_restarts")),
    Row("log_dir", "a log file for each rank", "`--log-dir`", to("launch.log_dir")),
    Row("standalone", "one host, any free port", "always so on one host", nothing),
    Row("rdzv_backend", "how hosts meet", "`c10d`, always", nothing),
    Row("rdzv_id", "name of the meeting", "not needed"),
    Row("rdzv_conf", "details of the meeting", "`--set launch.timeout_s=600`"),
    Row("module", "the script is a module", "`-m`", nothing),
    Row("monitor_interval", "seconds between looks at the ranks", "not needed"),
    Row("start_method", "how processes are started", "`spawn`, always"),
    Row("role", "a name of these ranks in logs", "not needed"),
    Row("local_addr", "this host's address", "found on the route to host 0"),
    Row("redirects", "streams that go to files alone", "`--log-dir`"),
    Row("tee", "streams that go to files, too", "`--log-dir`"),
    Row("local_ranks_filter", "ranks whose output is shown", "rank 0, and all error streams"),
    Row("no_python", "the script is no Python program", "not here"),
    Row("run_path", "runs the script by its path", "always"),
    Row("use_env", "local ranks in the environment", "always", nothing),
    Row("signals_to_handle", "signals that are passed on", "SIGTERM and Ctrl-C, always"),
    Row("virtual_local_rank", "each rank sees one device as its first", "not here"),
)

DEEPSPEED_LAUNCHER_ROWS: tuple[Row, ...] = (
    Row("num_nodes", "number of hosts", "`--nnodes`", _hosts),
    Row("num_gpus", "ranks on each host", "`--nproc-per-node`", set_ranks),
    Row("num_accelerators", "ranks on each host", "`--nproc-per-node`", set_ranks),
    Row("node_rank", "index of this host", "`--node-rank`", set_node_rank),
    Row("master_addr", "address of host 0", _ENDPOINT, nothing),
    Row("master_port", "port on host 0", _ENDPOINT, nothing),
    Row("module", "the script is a module", "`-m`", nothing),
    Row("hostfile", "hosts that are reached by ssh", "start the command on every host"),
    Row("include", "which devices of which hosts", "`CUDA_VISIBLE_DEVICES`", _devices),
    Row("exclude", "which devices of which hosts", "`CUDA_VISIBLE_DEVICES`", _devices),
    Row("launcher", "how other hosts are reached", "start the command on every host"),
    Row("launcher_args", "how other hosts are reached", "start the command on every host"),
    Row("no_ssh", "started on every host by hand", "always", nothing),
    Row("no_ssh_check", "no test of ssh", "not needed", nothing),
    Row("force_multi", "several hosts, though there is one", "not needed"),
    Row("enable_each_rank_log", "a log file for each rank", "`--log-dir`", to("launch.log_dir")),
    Row("bind_cores_to_rank", "cores of each rank", "`launch.threads_per_rank`"),
    Row("bind_core_list", "cores of each rank", "`launch.threads_per_rank`"),
    Row("save_pid", "writes the process id to a file", "not needed"),
    Row("no_local_rank", "no argument `--local_rank`", "always", nothing),
    Row("no_python", "the script is no Python program", "not here"),
    Row("autotuning", "tries settings", "not here"),
    Row("elastic_training", "goes on when hosts are lost", "`--max-restarts`"),
    Row("min_elastic_nodes", "goes on when hosts are lost", "`--max-restarts`"),
    Row("max_elastic_nodes", "goes on when hosts are lost", "`--max-restarts`"),
    Row("venv_script", "a script to run on every host", "not here"),
)

_SWITCHES = {
    "standalone",
    "module",
    "no_python",
    "run_path",
    "use_env",
    "virtual_local_rank",
    "no_ssh",
    "no_ssh_check",
    "force_multi",
    "bind_cores_to_rank",
    "no_local_rank",
    "elastic_training",
}


def translate_launcher(rows: Sequence[Row], line: CommandLine, program: str, folder: Path) -> Draft:
    """Return the draft of a launcher's options, over a DeepSpeed file that the script names."""
    draft, script = script_draft(line.script, folder)
    draft.script = (*(["-m"] if line.options.get("module") else []), *script)
    draft.read(settings(line.layer({}, program), rows))
    draft.apply(rows)
    return draft


class Torchrun(Importer):
    """torchrun, which has no files of its own."""

    programs: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("torchrun",),
        ("python", "-m", "torch.distributed.run"),
        ("python", "-m", "torch.distributed.launch"),
    )
    flags: ClassVar[Mapping[str, str]] = {row.key: row.here for row in TORCHRUN_ROWS}

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Refuse: there are no such files."""
        raise ConfigError("expected a command line of torchrun, found a file")

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a command line."""
        valued = {row.key for row in TORCHRUN_ROWS} - _SWITCHES
        short = {"-m": "module", "-t": "tee", "-r": "redirects"}
        line = read_options(words, valued, _SWITCHES, short, "torchrun")
        draft = translate_launcher(TORCHRUN_ROWS, line, "torchrun", folder)
        if "rdzv_endpoint" in draft.given and draft.hosts > 1:
            endpoint = draft.given["rdzv_endpoint"]
            host, _, port = str(endpoint.value).rpartition(":")
            parts = {"master_addr": host, "master_port": port} if host else {"master_addr": port}
            draft.read({key: Setting(key, value, endpoint.where) for key, value in parts.items()})
        set_hosts(draft, "master_addr", "master_port", "nnodes")
        return draft.finish()


class DeepSpeed(Importer):
    """DeepSpeed: its JSON, and the command ``deepspeed``."""

    title: ClassVar[str] = "a DeepSpeed configuration"
    programs: ClassVar[tuple[tuple[str, ...], ...]] = (("deepspeed",),)
    flags: ClassVar[Mapping[str, str]] = {
        row.key: row.here for row in DEEPSPEED_LAUNCHER_ROWS
    } | dict.fromkeys(
        (option.lstrip("-") for option in SCRIPT_OPTIONS),
        "`--config` with a file of `drivetrain config import FILE`",
    )

    def recognizes(self, values: Mapping[str, Any]) -> bool:
        """Return whether there are sections that DeepSpeed alone has."""
        marks = {
            ZERO,
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "bf16",
            "fp16",
        }
        return bool(marks & set(values))

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a JSON file."""
        return draft_of(layer).finish()

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a call of the launcher, with the JSON file that its script names."""
        valued = {row.key for row in DEEPSPEED_LAUNCHER_ROWS} - _SWITCHES
        short = {"-H": "hostfile", "-i": "include", "-e": "exclude"}
        line = read_options(words, valued, _SWITCHES, short, "deepspeed")
        draft = translate_launcher(DEEPSPEED_LAUNCHER_ROWS, line, "deepspeed", folder)
        set_hosts(draft, "master_addr", "master_port", "num_nodes")
        return draft.finish()
