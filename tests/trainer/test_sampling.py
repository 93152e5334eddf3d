from __future__ import annotations

from grpo_trainer.sampling import RepeatSampler


def test_order_without_shuffling():
    sampler = RepeatSampler(5, 2, prompts_per_batch=2, repeats=2)
    assert list(sampler) == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert len(sampler) == 16  # prompt 4 fills no batch


def test_shuffled_batches_hold_whole_groups():
    sampler = RepeatSampler(12, 4, prompts_per_batch=3, repeats=2, seed=1)
    indices = list(sampler)
    assert len(indices) == len(sampler) == 12 * 4 * 2
    seen = []
    for start in range(0, len(indices), 24):
        first, second = indices[start : start + 12], indices[start + 12 : start + 24]
        assert first == second
        groups = [first[i : i + 4] for i in range(0, 12, 4)]
        assert all(len(set(group)) == 1 for group in groups)
        seen += [group[0] for group in groups]
    assert sorted(seen) == list(range(12))


def test_every_process_and_every_resume_see_one_order():
    def order(epoch: int, seed: int = 3) -> list[int]:
        return list(RepeatSampler(50, 1, seed=seed, epoch=lambda: epoch))

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=4)
