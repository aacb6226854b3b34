"""Several observers of a run are told of everything, one after the other."""

from drivetrain.facade.prepared import Observer, Observers


class Doubling(Observer):
    def delivered(self, batch):
        return 2 * batch


def test_a_batch_passes_through_all_of_them():
    assert Observers(Doubling(), Observer(), Doubling()).delivered(3) == 12
