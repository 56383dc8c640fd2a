"""Hugging Face Trainer: a small BERT that learns whether a text holds one of two words, pruned while it trains.

Run with ``python examples/trainer_bert.py``; needs ``pip install bmrs[transformers]``.
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from bmrs.integrations.transformers import PruningCallback


def texts(number: int) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(2, 30, (number, 12))
    labels = ((words == 5) | (words == 7)).any(1).long()
    return [{"input_ids": ids, "labels": label} for ids, label in zip(words, labels, strict=True)]


def main(epochs: int) -> None:
    torch.manual_seed(0)
    train, test = texts(1000), texts(500)
    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=12,
    )  # fmt: skip
    model = BertForSequenceClassification(config)

    # Before the Trainer is made, so that its optimizer and its checkpoints hold the gates.
    pruning = PruningCallback(model, {"input_ids": torch.ones(2, 12, dtype=torch.long)}, phi_lr=30, strength=0.3)
    args = TrainingArguments(
        "runs/trainer_bert", num_train_epochs=epochs, learning_rate=2e-3, per_device_train_batch_size=32,
        weight_decay=0.01, save_strategy="epoch", save_total_limit=1, logging_strategy="epoch", report_to="none",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, callbacks=[pruning])
    trainer.compute_metrics = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
    trainer.train()  # or trainer.train(resume_from_checkpoint=True), after the same lines
    accuracy = trainer.evaluate()["eval_accuracy"]

    small = pruning.finish()  # an ordinary BertForSequenceClassification, smaller
    print(small.bert.encoder, pruning.reports[-1], sep="\n\n")
    print(f"\n{epochs} epochs: {accuracy:.1%} right with {small.num_parameters():,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    main(parser.parse_args().epochs)
