"""Every public name can be imported."""

import drivetrain


def test_every_public_name_exists():
    for name in drivetrain.__all__:
        assert getattr(drivetrain, name) is not None


def test_public_names_are_sorted():
    assert list(drivetrain.__all__) == sorted(drivetrain.__all__)


def test_unknown_name_is_an_attribute_error():
    try:
        drivetrain.no_such_name  # noqa: B018
    except AttributeError as error:
        assert "no_such_name" in str(error)
    else:
        raise AssertionError("expected an AttributeError")
