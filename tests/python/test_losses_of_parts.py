"""``engine.backward(loss)`` of losses that no call of ``engine(...)`` made: of parts of a model, of its own methods, of
several models in one module or in several engines. Against plain torch, to the bit."""

import pytest
import strata
import torch
from devices import to_test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiny_models import (
    VOCABULARY, WIDTH, Block, config_of, differences, full_parameters, make_batches, make_engine, make_model,
    rank_and_world,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


class Parts(nn.Module):
    """An encoder, a decoder and a critic, which scripts call by themselves."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.Sequential(Block(), Block())
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.critic = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens):
        return self.decoder(self.encoder(self.embedding(tokens)))

    def encode(self, tokens):
        return self.encoder(self.embedding(tokens)).mean(1)

    def value(self, tokens):
        return self.critic(self.embedding(tokens)).mean()


def _entropy(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def _of_modules(model, tokens):
    return _entropy(model.decoder(model.encoder(model.embedding(tokens))), tokens)


def _of_a_method(model, tokens):
    return model.encode(tokens).square().mean()


def _of_two_towers(model, tokens):
    text, image = model.encode(tokens), model.encode(tokens.flip(1))
    return _entropy(text @ image.T / model.temperature, torch.arange(len(tokens), device=tokens.device))


def _of_actor_and_critic(model, tokens):
    return _entropy(model(tokens), tokens) * (1.0 - model.value(tokens)) + model.value(tokens.flip(1)) ** 2


def _of_a_checkpoint(model, tokens):
    hidden = model.embedding(tokens)
    return _entropy(model.decoder(checkpoint(model.encoder, hidden, use_reentrant=True)), tokens)


def _of_weights_alone(model, tokens):
    return model.decoder.weight.square().mean() * tokens.float().mean()


LOSSES = (_of_modules, _of_a_method, _of_two_towers, _of_actor_and_critic, _of_a_checkpoint, _of_weights_alone)


def _losses():
    rank, world = rank_and_world()
    for stage in (0, 1, 2, 3):
        for dtype, torch_dtype, accumulation in (("fp32", torch.float32, 1), ("bf16", torch.bfloat16, 2)):
            reference = PlainTrainer(make_model(Parts), world, lambda p: torch.optim.SGD(p, lr=0.05), torch_dtype,
                                     accumulation=accumulation)
            model = make_model(Parts)
            engine = make_engine(model, config_of(stage, dtype, accumulation, live_bytes=1, optimizer=False),
                                 optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
            for index, tokens in enumerate(make_batches(accumulation * len(LOSSES), world)):
                loss_function = LOSSES[index // accumulation]
                expected = reference.micro_step(tokens, loss_function)
                loss = loss_function(engine.module, tokens[rank])
                engine.backward(loss)
                engine.step()
                assert loss.item() == expected[rank], (stage, dtype, loss_function)
                if (index + 1) % accumulation == 0:
                    reference.step(engine.get_global_grad_norm())
                    assert differences(full_parameters(model), reference.values()) == [], (stage, loss_function)
            engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_loss_of_parts_of_the_model_trains_them(world):
    run_ranks(world, _losses)


def _foreign_losses():
    rank, world = rank_and_world()
    tokens = make_batches(2, world)
    for stage in (0, 3):
        engine = make_engine(make_model(Parts), config_of(stage))
        other = nn.Linear(3, 3)
        with pytest.raises(strata.UsageError, match="no parameter of this engine a gradient"):
            engine.backward(other(torch.ones(2, 3)).sum())
        with pytest.raises(strata.UsageError, match="without a backward pass"):
            engine.step()
        engine.backward(_of_modules(engine.module, tokens[0, rank]))  # and goes on
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_of_another_model_is_an_error(world):
    run_ranks(world, _foreign_losses)


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), nn.Linear(WIDTH, WIDTH))


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), nn.Linear(WIDTH, 1))


def _gan_step(nets, steps, backward, drop, noise, real):
    """A step of the usual script; the generator's pass goes through the discriminator, and leaves gradients there."""
    generator, discriminator = nets
    drop(1)
    backward(1, -discriminator(real).mean())
    fake = generator(noise)
    backward(1, discriminator(fake.detach()).mean())
    steps(1)
    drop(0)
    backward(0, -discriminator(fake).mean())
    steps(0)


def _gan():
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed(3)
    data = to_test_device(torch.randn(3, 2, world, 4, 5, WIDTH, generator=generator))
    for stage in (0, 1, 2, 3):
        for by in (("engine", "module", "optimizer")[stage % 3],):
            plain = [PlainTrainer(make_model(c), 1, lambda p: torch.optim.SGD(p, lr=0.05)).model
                     for c in (Generator, Discriminator)]
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in plain]
            models = [make_model(c) for c in (Generator, Discriminator)]
            engines = [make_engine(m, config_of(stage, optimizer=False, train_micro_batch_size_per_gpu=4),
                                   optimizer=torch.optim.SGD(m.parameters(), lr=0.05)) for m in models]
            droppers = {"engine": engines, "module": models, "optimizer": [e.optimizer for e in engines]}[by]
            for noise, real in data:
                # One process that has all ranks' batches is the reference: every loss is a mean.
                _gan_step(plain, lambda i: optimizers[i].step(), lambda i, loss: loss.backward(),
                          lambda i: optimizers[i].zero_grad(), noise.flatten(0, 1), real.flatten(0, 1))
                _gan_step(engines, lambda i: engines[i].step(), lambda i, loss: engines[i].backward(loss),
                          lambda i: droppers[i].zero_grad(), noise[rank], real[rank])
                for model, expected in zip(models, plain):
                    found = full_parameters(model)
                    for name, value in expected.named_parameters():
                        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=f"{stage} {by} {name}")
            for engine in engines:
                engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_gan_of_two_engines_trains_as_in_torch(world):
    run_ranks(world, _gan)
