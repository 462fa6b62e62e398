"""transformers' Trainer: the model is compiled in place before the Trainer gets it, with the budget among the options.

    python examples/transformers_trainer.py [--budget 20MiB] [--by-arguments]

`TrainingArguments(torch_compile_backend="dyngran")` has no place for options, and Accelerate refuses every backend that is not on a list of
its own (ValueError: 'DYNGRAN' is not a valid DynamoBackend). `--by-arguments` puts it on that list; the budget is then a default.
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate.utils import DynamoBackend
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dyngran

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out
from outcome import DEVICE, StepPeak, argument_parser, judge  # noqa: E402  # after the line above

ROWS = 16 if DEVICE.type == "cpu" else 512
VOCABULARY = 64
STEPS = 16


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from a random start, modulo the vocabulary."""

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.randint(VOCABULARY, ()) + torch.arange(64)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def put_on_list_of_accelerate(cls: type[DynamoBackend], value: object) -> DynamoBackend | None:
    """`enum`'s hook for values that are no members."""
    if value != "DYNGRAN":
        return None
    backend = str.__new__(cls, value)
    backend._name_ = backend._value_ = value
    return backend


def main() -> None:
    parser = argument_parser(__doc__, cpu="20MiB", cuda="1GiB")
    parser.add_argument("--by-arguments", action="store_true", help="compile by TrainingArguments(torch_compile_backend='dyngran')")
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    options = {"budget": asked.budget, "codegen": asked.codegen}
    if asked.by_arguments:
        DynamoBackend._missing_ = classmethod(put_on_list_of_accelerate)
        dyngran.set_defaults(**options)  # or the environment: DYNGRAN_BUDGET=20GiB
    else:
        model.compile(backend="dyngran", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dyngran.attach(model, optimizer)  # its state is planned for before the first step creates it
    with tempfile.TemporaryDirectory() as folder, StepPeak() as peak:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            torch_compile_backend="dyngran" if asked.by_arguments else None,
            disable_tqdm=True,
            use_cpu=DEVICE.type == "cpu",
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Counting(), optimizers=(optimizer, None))
        trainer.train()
    judge([row["loss"] for row in trainer.state.log_history if "loss" in row], model, peak)


if __name__ == "__main__":
    main()
