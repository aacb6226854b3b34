"""Every seeded defect still applies, and its tests exist; ``run.py`` shows that they catch it."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("run", Path(__file__).with_name("run.py"))
RUN = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(RUN)


def test_every_defect_applies():
    found = RUN.defects()
    assert len({defect.name for defect in found}) == len(found) >= 40
    for defect in found:
        wrong = defect.applied(RUN.ROOT)
        compile(wrong, defect.file, "exec")
        assert defect.tests
        for test in defect.tests:
            assert (RUN.ROOT / test.partition("::")[0]).exists(), test


def test_all_plugins_and_the_core_have_defects():
    places = {Path(defect.file).parts[1] for defect in RUN.defects()}
    plugins = {path.name for path in (RUN.ROOT / "plugins").glob("drivetrain_*")}
    assert places >= {*plugins, "drivetrain"}
