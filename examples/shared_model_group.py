"""A prover and a verifier share one model, which SFT, DPO and RL jobs fine-tune one after the other.

All services run in this process, on a log in memory: `python examples/shared_model_group.py FOLDER`, about ten seconds
on a CPU. With a Kafka log in place of `MemoryLog` and `rollstream serve` for the services (docs/shared-models.md shows
how), jobs survive the end of this process; open the group again and it goes on.

The log-probabilities of the RL job are invented, so the learner warns that engine and learner differ. Yours come from
the engine that sampled the rollouts; then this warning is to be taken seriously.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.services.one_process import services
from rollstream.learner.shared_model_group import FineTuneOptions, GroupAgent, SharedAgentParams, SharedModelGroup
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events.recorded import (
    RecordedChat,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)
from rollstream.schemas.settings import OptimizerSettings

TIMEOUT_S = 300.0


def rollout(prompt: str, answer: str) -> RecordedRollout:
    """One call as text; its tokens are made by the model's tokenizer."""
    chat = RecordedChat(
        messages=({"role": "user", "content": prompt},), answer={"role": "assistant", "content": answer}
    )
    return RecordedRollout(steps=(RecordedStep(chat=chat),))


def sampled(token: int, reward: float) -> RecordedRollout:
    """One call with exact tokens, log-probabilities (invented here, else the engine's) and its reward, as RL needs."""
    call = RecordedTokens.of(prompt_ids=[4, 7, 5], completion_ids=[token, 1], logprobs=[-2.3, -0.1])
    return RecordedRollout(steps=(RecordedStep(tokens=call),), rewards=(RecordedReward(value=reward),))


async def fine_tune(group: SharedModelGroup) -> list[str]:
    """Three jobs; the group's model after each."""
    models: list[str] = []
    claims = [f"{n} is even" for n in range(8)]
    truth = ["accept" if n % 2 == 0 else "reject" for n in range(8)]
    lies = ["reject" if verdict == "accept" else "accept" for verdict in truth]

    await group.create_supervised_fine_tune_job(
        {"prover": [rollout(claim, "believe me") for claim in claims]},
        guess_replaced_rollouts={
            "verifier": [
                (rollout(claim, "?"), int(verdict == "accept")) for claim, verdict in zip(claims, truth, strict=True)
            ]
        },
        job_name="imitate",
    )
    models.append(await finished(group))

    await group.create_dpo_fine_tune_job(
        {"verifier": [rollout(claim, verdict) for claim, verdict in zip(claims, truth, strict=True)]},
        {"verifier": [rollout(claim, verdict) for claim, verdict in zip(claims, lies, strict=True)]},
        job_name="prefer",
    )
    models.append(await finished(group))

    print("the next job's log-probabilities are invented, so expect a warning about them", file=sys.stderr)
    groups = [[sampled(8, reward=1.0), sampled(9, reward=0.0)] for _ in claims]
    await group.create_rl_fine_tune_job({"prover": groups}, job_name="reinforce")
    models.append(await finished(group))
    return models


async def finished(group: SharedModelGroup) -> str:
    """Wait for the newest job, and adopt its model."""
    status = await group.wait_for_fine_tune_job(timeout=TIMEOUT_S)
    if status != "succeeded":
        raise SystemExit(f"{group.fine_tune_job_id} {status}: {await group.get_fine_tune_job_error_repr()}")
    return await group.switch_to_next_model()


async def main(folder: Path) -> list[str]:
    """Run the example in a folder; the group's model after each job."""
    model = make_tiny_model(folder / "tiny")
    params = SharedAgentParams(model_name=str(model), use_lora=False, device="cpu")
    agents = [GroupAgent("prover", params, "players"), GroupAgent("verifier", params, "players", is_verifier=True)]
    options = FineTuneOptions(optimizer=OptimizerSettings(learning_rate=1e-3), min_examples=4, threads=1)
    artifacts, log = str(folder / "artifacts"), MemoryLog(num_partitions=2)
    engine = TransformersEngine(TransformersSettings(threads=1))
    await engine.start()
    try:
        async with (
            services(log, artifacts, folder, engine, allow=(f"model:{model}",), threads=1),
            await SharedModelGroup.open(
                log, ArtifactStore(artifacts), agents, run_id="example", group_name="players", options=options
            ) as group,
        ):
            return await fine_tune(group)
    finally:
        await engine.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print("\n".join(asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else made)))))
