from peagle.corpus.unique import UniqueIds


def test_ids_that_are_there_once_are_unique():
    with UniqueIds() as ids:
        for n in range(20_000):
            ids.add(f"id-{n}", n % 3, n)
        assert ids.first_repeated() is None


def test_the_first_repetition_is_found_with_both_places_even_on_disk():
    with UniqueIds() as ids:
        for n in range(1_000_000):
            ids.add(str(n), 0, n)
        for value, line in (("999", 5), ("17", 2), ("17", 9)):
            ids.add(value, 1, line)
        assert ids.first_repeated() == ((0, 17), (1, 2))
