"""The modules in which a silent mistake hurts most, and the tests that have to notice it.

Read by `sampled_run`. The tests are of the fast tier, cheap ones first: a run stops at the first that fails.
"""

from __future__ import annotations

_ALGORITHMS = "tests/learner/algorithms"
_TRAINING = "tests/learner/training"
_STEPS = (
    f"{_TRAINING}/test_settings_reach_the_weights.py",
    f"{_TRAINING}/test_bad_batches.py",
    "tests/learner/checkpoints/test_training_state.py",
    "tests/learner/model/test_lora.py",
    f"{_TRAINING}/test_sft.py",
    f"{_TRAINING}/test_trainer.py",
    f"{_TRAINING}/test_tree_training.py",
)
_LEDGER = "tests/buffers/ledger"
_BOOKS = tuple(
    f"{_LEDGER}/test_{name}.py" for name in ("batches", "scores", "leases", "checkpoints", "ledger", "stored_groups")
)
_CONVERSATION = "tests/mocked_server/conversation"
_CONTINUED = (f"{_CONVERSATION}/test_continuation.py", f"{_CONVERSATION}/test_live_episodes.py")
_SERVED = "tests/mocked_server/test_server.py"

WATCHED: dict[str, tuple[str, ...]] = {
    "learner/algorithms/advantages.py": (
        f"{_ALGORITHMS}/test_advantages.py",
        f"{_ALGORITHMS}/test_teacher.py",
        f"{_ALGORITHMS}/test_losses.py",
        _STEPS[0],
    ),
    "learner/algorithms/importance_weights.py": (
        f"{_ALGORITHMS}/test_importance_weights.py",
        f"{_ALGORITHMS}/test_losses.py",
        f"{_ALGORITHMS}/test_documented.py",
    ),
    "learner/algorithms/kl.py": (f"{_ALGORITHMS}/test_kl.py", _STEPS[0]),
    "learner/algorithms/losses.py": (f"{_ALGORITHMS}/test_losses.py", _STEPS[0]),
    "learner/algorithms/objectives.py": (
        f"{_ALGORITHMS}/test_losses.py",
        f"{_ALGORITHMS}/test_entropy.py",
        f"{_ALGORITHMS}/test_documented.py",
        _STEPS[0],
    ),
    "learner/algorithms/overlong_penalty.py": (
        f"{_ALGORITHMS}/test_overlong_penalty.py",
        "tests/env_adapters/scoring/test_rewards.py",
    ),
    "learner/training/tree_packing.py": (f"{_TRAINING}/test_tree_packing.py", f"{_TRAINING}/test_tree_training.py"),
    "learner/training/stems.py": (f"{_TRAINING}/test_stems.py",),
    "learner/training/packing.py": (f"{_TRAINING}/test_packing.py", f"{_TRAINING}/test_batch_tensors.py"),
    "learner/training/batch_tensors.py": (f"{_TRAINING}/test_batch_tensors.py", *_STEPS[:1]),
    "learner/training/trainer.py": _STEPS,
    "buffers/training_rows.py": ("tests/buffers/test_training_rows.py",),
    "buffers/ledger/batches.py": _BOOKS,
    "buffers/ledger/scores.py": (_BOOKS[1], _BOOKS[0], *_BOOKS[2:]),
    "buffers/ledger/checkpoints.py": (_BOOKS[3], *_BOOKS[:3], _BOOKS[4]),
    "buffers/ledger/encode.py": (f"{_LEDGER}/test_round_codec.py", *_BOOKS),
    "mocked_server/conversation/continuation.py": (*_CONTINUED, f"{_CONVERSATION}/test_branch_diagnosis.py"),
    "mocked_server/conversation/chat_history.py": (
        f"{_CONVERSATION}/test_chat_history.py",
        f"{_CONVERSATION}/test_replies.py",
        *_CONTINUED,
    ),
    "mocked_server/conversation/live_episodes.py": (
        *_CONTINUED[::-1],
        f"{_CONVERSATION}/test_restored_rounds.py",
        _SERVED,
    ),
    "mocked_server/dispatch.py": (f"{_CONVERSATION}/test_loop_trajectories.py",),
    "mocked_server/keys.py": ("tests/mocked_server/test_keys.py", "tests/mocked_server/http/test_request_limits.py"),
    "mocked_server/http/attribution.py": ("tests/mocked_server/http/test_attribution.py", _SERVED),
}
"""Module -> its tests."""
