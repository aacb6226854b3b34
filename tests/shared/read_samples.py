"""Datasets of numbers that remember what was read."""

from torch.utils.data import Dataset, IterableDataset, get_worker_info


class CountingDataset(Dataset):
    """The numbers 0 to n - 1; remembers which were read in this process."""

    def __init__(self, n):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    """The numbers 0 to n - 1, divided over workers; counts what was read."""

    def __init__(self, n, first=0):
        self.numbers = range(first, first + n)
        self.read = 0
        self.epochs = []

    def __iter__(self):
        info = get_worker_info()
        numbers = self.numbers if info is None else self.numbers[info.id :: info.num_workers]
        for number in numbers:
            self.read += 1
            yield number

    def set_epoch(self, epoch):
        self.epochs.append(epoch)
