"""Your own training loop around the fused loss: no trainer, no logits.

The model samples completions, a rule scores them, and the loss is computed from the last hidden
states and the head's weight. The model learns to write many zeros.
"""

from __future__ import annotations

import torch

from grpo_kernels import FusedLinearGRPOLoss
from grpo_trainer.demo.policy import make_policy, make_tokenizer

GROUP, STEPS, LENGTH = 16, 20, 6


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer, seed=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    loss_of = FusedLinearGRPOLoss(loss_type="dapo", epsilon_high=0.28)
    zero = tokenizer.convert_tokens_to_ids("0")
    prompts = tokenizer(["12=", "34=", "56=", "78="], return_tensors="pt").input_ids
    prompts = prompts.repeat_interleave(GROUP, dim=0)
    start = prompts.shape[1]
    history = []

    for step in range(STEPS):
        with torch.no_grad():
            sampled = policy.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),  # there is no padding
                max_new_tokens=LENGTH,
                min_new_tokens=LENGTH,
                do_sample=True,
                top_k=0,
            )
        completions = sampled[:, start:]
        rewards = (completions == zero).float().mean(1)
        history.append(rewards.mean().item())
        grouped = rewards.view(-1, GROUP)
        centred = grouped - grouped.mean(1, keepdim=True)
        advantages = centred / (grouped.std(1, keepdim=True) + 1e-4)

        hidden = policy.model(sampled).last_hidden_state[:, start - 1 : -1]  # (B, L, D)
        mask = torch.ones_like(completions)
        loss, metrics = loss_of(
            hidden, policy.lm_head.weight, completions, advantages.flatten(), mask
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == STEPS - 1:
            entropy = metrics["entropy"].item()
            print(f"step {step}: reward {rewards.mean():.3f}, entropy {entropy:.3f}")
    print(f"final reward {history[-1]:.3f}, at first {history[0]:.3f}")


if __name__ == "__main__":
    main()
