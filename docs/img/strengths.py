"""Draw docs/img/strengths.svg: how much of a baked prompt shows at 11 scales of its LoRA.

    python docs/img/strengths.py results/traj_chat results/without

Of runs of the demo: 300 replies to its test questions, at temperature 1, for each scale. Prints the
shares that it draws.
"""

import sys

import torch
from matplotlib import pyplot as plt

from ddp_utils import distributed
from lm import logps, lora, models, sampling
from lm.chat_template import Encoder
from lm.judge import load_judge
from prompt_baking import trajectories

SCALES = [step / 10 for step in range(11)]


def shares(folder: str) -> list[float]:
    """Return the share of replies in capitals at each of SCALES."""
    cpu = torch.device("cpu")
    encoder = Encoder(models.load_tokenizer("data/demo/model"))
    questions = trajectories.read_questions("data/demo/questions_test.jsonl") * 3
    prompts = [trajectories.prompt(encoder, "", question) for question in questions]
    judge = load_judge("data/demo/judge.py:capitals")
    spec = sampling.SampleSpec(1.0, 1.0, max_new_tokens=60, batch_size=100, seed=0)
    heights = []
    for scale in SCALES:
        model = lora.merge(
            models.load("data/demo/model", torch.float32, cpu), f"{folder}/model", scale
        )
        scorer = logps.Scorer(model)
        ids = sampling.generate(scorer, prompts, encoder.ends, distributed.World(), spec)
        texts = encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)
        scores = [judge(*pair)["capitals"] for pair in zip(questions, texts, strict=True)]
        heights.append(sum(scores) / len(scores))
    return heights


def main() -> None:
    """Draw the picture."""
    torch.set_num_threads(1)
    plt.rcParams["svg.hashsalt"] = "strengths"
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    names = ["retain_share 0.3", "without retention"]
    for name, folder in zip(names, sys.argv[1:], strict=True):
        heights = shares(folder)
        print(name, " ".join(f"{height:.3f}" for height in heights))
        axis.plot(SCALES, heights, "o-", label=name)
    axis.set(xlabel="scale of the LoRA", ylabel="replies in capitals", ylim=(-0.02, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig("docs/img/strengths.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
