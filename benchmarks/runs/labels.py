"""Labels of the runs by a practitioner, written before any rule was run on them."""

from __future__ import annotations

from dataclasses import dataclass

EXPLOSION = frozenset({"exploding_gradient", "exploding_activation"})
LOSS = frozenset({"loss_divergence", "loss_spike"})
TREND = frozenset({"exponential_trend"})


@dataclass(frozen=True, kw_only=True)
class Label:
    """Expected alerts of a run.

    Attributes:
        kinds: Kinds of alerts any of which is right; none for a healthy run.
        layers: Modules any of which should be named, with their submodules; none: any.
        onset: The first step at which it can be seen.
        by: The last step at which the alert is still useful; None: any.
        why: The fault, or an oddity that is no fault.
    """

    kinds: frozenset[str] = frozenset()
    layers: tuple[str, ...] = ()
    onset: int = 0
    by: int | None = None
    why: str


LABELS = {
    # --- healthy
    "seq2seq_teacher_forcing": Label(why="GRU encoder and decoder, reverses digits; clipped"),
    "wgan_gradient_penalty": Label(why="five critic steps, double backward; losses wander"),
    "image_text_contrastive": Label(why="two towers, learned temperature; starts at ln of batch"),
    "unet_segmentation": Label(why="skip connections, cross entropy and Dice, batch norm"),
    "ctc_speech": Label(why="the loss falls, rests on a plateau of blanks, and falls again"),
    "graph_transformer": Label(why="attention as a module, bias of edges, post-norm, warm-up"),
    "neural_ode": Label(why="one layer runs 32 times in a step; trajectories diverge at first"),
    "coupling_flow": Label(why="the last layers begin at zero; the loss becomes negative"),
    "actor_critic": Label(why="one model, two optimizers, returns that grow as the policy learns"),
    "quantization_aware": Label(why="straight-through rounding; quantization begins at step 100"),
    "distillation": Label(why="teacher frozen inside of the same model and in eval mode"),
    "mixture_density": Label(why="negative log-likelihood; some components die"),
    "triplet_siamese": Label(why="the loss is exactly 0 for many batches, late"),
    "meta_learning": Label(why="inner steps by autograd.grad; a loss that varies with the task"),
    "sparse_autoencoder": Label(why="top 8 of 128 latents are kept: sparse by design"),
    "state_space": Label(why="diagonal recurrence over 47 steps, gating"),
    "spiking_surrogate": Label(why="binary outputs, surrogate gradients, many silent neurons"),
    "matrix_factorization": Label(why="embedding tables, most rows unused in a step"),
    "physics_informed": Label(why="second derivatives, tanh; the loss falls by decades"),
    "layerwise_rates_ema": Label(why="rates from 1e-5 to 1e-3, three optimizers, an averaged copy"),
    "frozen_batch_norm": Label(why="fine-tuning with all batch norms in eval mode on purpose"),
    "text_ok": Label(why="weights as small as GPT-2's, no dropout"),
    "decay_in_loss": Label(why="squares of the weights as a term of the loss"),
    "strong_decay_of_grokking": Label(why="weight decay 1: weights shrink while the loss falls"),
    "rate_decays": Label(why="by a tenth every 20 steps"),
    "rate_warms_up_by_a_factor": Label(why="from a thousandth, by 7 % in each of 100 steps"),
    "values_discounted": Label(why="TD(0), discount 0.95: values and the loss rise at first"),
    "rates_fall_by_layer": Label(why="by 0.65 in each of nine layers, as in fine-tuning"),
    "second_stage_freezes_trunk": Label(why="requires_grad_(False), and an optimizer of the head"),
    "router_learns": Label(why="experts weighted by their share, with a balancing loss"),
    "siamese_kept_apart": Label(why="a term for the variance of each unit"),
    "batch_norms_train": Label(why="a small CNN"),
    "hard_batch_every_40": Label(why="one batch of noise every 40 steps; its loss is high"),
    "classes_join": Label(why="two new classes each 200 steps, at which the loss jumps"),
    "copying_from_further_back": Label(why="a harder task each 150 steps; clipped"),
    "series_with_another_period": Label(why="other data from step 300 on"),
    "weak_signal": Label(why="the loss is at its optimum from the start, and noise"),
    # --- faulty
    "rate_jumps_for_ten_steps": Label(
        kinds=LOSS | EXPLOSION | {"dead_units", "nonfinite"},
        onset=205,
        by=230,
        why="the learning rate is 100 times as large for ten steps",
    ),
    "encoder_not_in_optimizer": Label(
        kinds=frozenset({"untrained_parameters"}), layers=("down1", "down2", "middle"), by=100,
        why="the optimizer of a U-Net was given the decoder alone; the rest gets gradients",
    ),
    "encoder_under_no_grad": Label(
        kinds=frozenset({"untrained_parameters"}), layers=("encoder",), by=100,
        why="no_grad() left around the encoder of a sequence model; it is in the optimizer",
    ),
    "head_optimizer_never_stepped": Label(
        kinds=frozenset({"untrained_parameters", "exploding_gradient"}), layers=("critic",), by=100,
        why="two optimizers, and step() of the second one was forgotten",
    ),
    "pooler_unused": Label(
        kinds=frozenset({"untrained_parameters"}), layers=("pooler",), by=100,
        why="an unused head; worth a note",
    ),
    "ctc_impossible_length": Label(
        kinds=frozenset({"nonfinite"}), onset=117, by=117,
        why="one target is longer than its input: the loss is infinite",
    ),
    "quantization_scale_zero": Label(
        kinds=frozenset({"nonfinite"}), layers=("quantize2",), onset=133, by=133,
        why="a layer is zero for a batch, its scale is 0, and 0/0 follows",
    ),
    "flow_without_bound": Label(
        kinds=frozenset({"nonfinite"}) | LOSS | EXPLOSION, by=200,
        why="exp of an unbounded log-scale, learning rate 30 times too high",
    ),
    "state_space_unstable": Label(
        kinds=frozenset({"nonfinite"}) | LOSS | EXPLOSION, by=60,
        why="decay above 1: the state grows 1.5 times in each of 47 steps",
    ),
    "ode_step_too_long": Label(
        kinds=frozenset({"nonfinite"}) | LOSS | EXPLOSION, by=60,
        why="the solver's step is 25 times too long: the state explodes",
    ),
    "student_left_in_eval": Label(
        kinds=frozenset({"eval_mode"}), onset=83, by=283,
        why="eval() left on after a validation: dropout off, batch norm frozen",
    ),
    "first_batch_forever": Label(
        kinds=frozenset({"same_batch"}), by=300,
        why="next(iter(loader)) in the loop without shuffling",
    ),
    "rate_spike": Label(
        kinds=LOSS, onset=157, by=167,
        why="a schedule's bug: learning rate x 200 for three steps; the loss does not recover",
    ),
    "target_spike": Label(
        kinds=LOSS | EXPLOSION, onset=213, by=223,
        why="one batch of targets in another unit, x 100; the loss recovers",
    ),
    "schedule_ends_early": Label(
        kinds=frozenset({"learning_rate_zero"}), onset=83, by=283,
        why="a polynomial schedule made for 83 of 320 steps",
    ),
    "targets_misaligned": Label(
        kinds=frozenset({"loss_stuck", "no_learning"}),
        why="inputs were shuffled and targets were not: the loss stays at the trivial predictor's",
    ),
    "sparsity_too_strong": Label(
        kinds=frozenset({"dead_units", "vanishing_gradient"}), layers=("latent", "encoder"),
        why="L1 penalty 1000 times too strong: all latents die",
    ),
    "spikes_never_fire": Label(
        kinds=frozenset({"dead_units", "vanishing_gradient", "loss_stuck", "no_learning"}),
        why="threshold 50 instead of 1: no neuron fires, the output is constant",
    ),
    "attention_one_hot": Label(
        kinds=frozenset({"attention_collapse", "saturated_units"}),
        layers=("blocks",), by=200,
        why="queries and keys x 12 and no 1/sqrt(d): each token sees one other",
    ),
    "logits_grow": Label(
        kinds=frozenset({"attention_collapse"}) | LOSS, layers=("blocks",), by=280,
        onset=60, why="learning rate of queries and keys x 100 from step 60, without a warm-up",
    ),
    "text_loss_negated": Label(
        kinds=frozenset({"unbounded_loss"}) | LOSS | EXPLOSION, by=150,
        why="the sign of the loss: it falls from -4 to -18",
    ),
    "logits_into_nll": Label(
        kinds=frozenset({"unbounded_loss"}) | LOSS | EXPLOSION, by=100,
        why="nll_loss of logits, log_softmax forgotten: the loss falls to -10,000",
    ),
    "text_decay_x1000": Label(
        kinds=TREND | {"loss_stuck"}, by=200,
        why="weight decay 30: weights shrink by 3 % at each step, the loss comes back to ln 64",
    ),
    "decay_far_too_strong": Label(
        kinds=TREND | {"loss_stuck"}, by=200, why="weight decay 20: nothing is learned",
    ),
    "decay_in_loss_of_wrong_sign": Label(
        kinds=TREND | EXPLOSION | LOSS | {"unbounded_loss"}, by=250,
        why="the squares of the weights are subtracted: they grow by 1 % at each step",
    ),
    "rate_decay_inverted": Label(
        kinds=TREND | LOSS | EXPLOSION, by=200, why="divided instead of multiplied by 0.75",
    ),
    "values_discount_above_one": Label(
        kinds=TREND | LOSS | EXPLOSION, by=200, why="discount 1.1: the loss grows 2 % per step",
    ),
    "rates_vanish_by_layer": Label(
        kinds=frozenset({"layers_not_learning", "no_learning", "vanishing_gradient"}), by=200,
        layers=tuple(str(2 * layer) for layer in range(6)),
        why="the rate falls by 0.05 from layer to layer",
    ),
    "optimizer_rebuilt_without_trunk": Label(
        kinds=frozenset({"untrained_parameters", "layers_not_learning"}), layers=("0",),
        onset=137, by=317, why="from step 137 on only the head is stepped",
    ),
    "router_without_balance": Label(
        kinds=frozenset({"expert_collapse"}), layers=("router",), by=250,
        why="the best of four experts without a balancing loss: most get no tokens",
    ),
    "router_behind_argmax": Label(
        kinds=frozenset({"untrained_parameters", "layers_not_learning"}), layers=("router",),
        by=150, why="the router is not in the loss",
    ),
    "siamese_collapses": Label(
        kinds=frozenset({"output_collapse", "dead_units"}),
        why="two views are pulled together and nothing apart: all inputs get one embedding",
    ),
    "batch_norms_in_eval_from_start": Label(
        kinds=frozenset({"eval_mode"}), by=100, layers=("1", "5"),
        why="batch norms with the statistics that they were made with: they do nothing",
    ),
    "garbage_for_ten_batches": Label(
        kinds=frozenset({"loss_spike"}), onset=173, by=190,
        why="ten batches of noise double the loss",
    ),
    # --- further, healthy
    "tied_lstm": Label(why="embedding and output share one weight"),
    "actor_of_growing_value": Label(why="loss -Q falls and falls as Q grows to its bound"),
    "learned_variance": Label(why="Gaussian negative log-likelihood; the loss becomes negative"),
    "score_matching": Label(why="denoising; a large part of the loss cannot be learned"),
    "vector_quantized": Label(why="straight-through codes; most codes are unused in a batch"),
    "spectral_norm_gan": Label(why="hinge loss, one critic step; the losses stay near a constant"),
    "weight_normalized": Label(why="weights by direction and length"),
    "pruned_by_l1": Label(why="a penalty takes most weights to 0, not the loss"),
    "modular_addition": Label(why="weight decay 1.0, all data in each step: grokking"),
    "lion": Label(why="sign of a running mean; an optimizer of the user's own"),
    "adagrad": Label(why="rates that only fall"),
    "q_learning": Label(why="discount 0.97: loss and Q rise first; the loss is small throughout"),
    "value_learning": Label(why="discount 0.95: values rise to 20, the loss rises first"),
    "mixture_of_experts": Label(why="the best two of four experts, times the router's share"),
    "simsiam": Label(why="stop-gradient and a predictor: the loss nears -1, no collapse"),
    "layerwise_decay": Label(why="rates fall by 0.7 in each of 8 blocks, to 3 percent"),
    "exponential_warm_up": Label(why="the rate begins at 1e-6: no learning at first"),
    "hard_batches": Label(why="every 40th batch has three times the loss, by its data"),
    "curriculum": Label(why="more noise after each 100 steps: the loss rises by design"),
    "trunk_frozen_late": Label(why="all but the head frozen from step 153, on purpose"),
    "autocast_bfloat16": Label(why="transformer in bfloat16"),
    "rezero": Label(why="scales begin at 0: blocks get no gradient at first"),
    "skip_init": Label(why="30 blocks whose scales begin at 0.001, and move by Adam's full steps"),
    "targets_of_large_unit": Label(why="targets of 1e5: weights grow by equal steps for long"),
    "curve_by_heart": Label(why="64 points, all in each step: late, Adam's steps spike and settle"),
    # --- further, faulty
    "block_weight_scaled": Label(
        kinds=EXPLOSION | LOSS | {"weight_jump"}, layers=("blocks.1",), onset=143, by=243,
        why="one layer's weight was multiplied by 100 and stays large",
    ),
    "gradient_scaled_by_hook": Label(
        kinds=EXPLOSION, layers=("blocks.1.up",), onset=151, by=251,
        why="a hook multiplies one weight's gradient by 1e5; clipping then stops all others",
    ),
    "root_at_zero": Label(
        kinds=frozenset({"nonfinite"}), layers=("encoder",), onset=127, by=128,
        why="a row is all zero: its norm is clamped forward, and its gradient is NaN",
    ),
    "row_fully_masked": Label(
        kinds=frozenset({"nonfinite"}), layers=("blocks.0",), onset=139, by=139,
        why="one query may see no key: the softmax of -inf alone is NaN",
    ),
    "exp_overflows": Label(
        kinds=frozenset({"nonfinite"}), layers=("4",), onset=145, by=145,
        why="one picture in another unit, x 1000: exp as an activation overflows",
    ),
    "feature_without_deviation": Label(
        kinds=frozenset({"nonfinite"}), layers=("standardize",), onset=149, by=149,
        why="all rows of a batch are equal: 0/0 in a standardization without an epsilon",
    ),
    "rate_of_one_group": Label(
        kinds=EXPLOSION | LOSS, layers=("middle",), onset=121, by=221,
        why="the learning rate of one parameter group x 1000",
    ),
    "recurrence_radius_three": Label(
        kinds=EXPLOSION | LOSS | frozenset({"nonfinite"}), layers=("rnn",), onset=111, by=211,
        why="the recurrent matrix is scaled to spectral radius 3; 24 time steps",
    ),
    "log_of_negative": Label(
        kinds=frozenset({"nonfinite"}), layers=("log",), onset=131, by=131,
        why="one measured amount is negative, and one branch takes its logarithm",
    ),
    "half_overflows": Label(
        kinds=frozenset({"nonfinite"}), layers=("conv2",), onset=129, by=129,
        why="a scale is raised and the cast to float16 gives inf in one convolution",
    ),
    "bit_flip": Label(
        kinds=frozenset({"nonfinite"}), layers=("blocks.1",), onset=137, by=137,
        why="one number of one weight becomes NaN",
    ),
    "loss_weight_of_one_task": Label(
        kinds=EXPLOSION | LOSS, layers=("amount",), onset=133, by=233,
        why="the weight of one task's loss x 1e6",
    ),
    "layer_begins_large": Label(
        kinds=EXPLOSION | LOSS | frozenset({"nonfinite"}), layers=("3",), onset=0, by=10,
        why="one layer's weights begin 1000 times too large; SGD",
    ),
    "loss_weight_of_one_head": Label(
        kinds=EXPLOSION | LOSS, layers=("heads.3",), onset=151, by=251,
        why="the weight of one of six losses x 1e4",
    ),
    "inputs_all_zero": Label(
        kinds=frozenset({"same_batch", "loss_stuck"}), onset=0,
        why="pixels divided by 255 as integers: all are 0",
    ),
}  # fmt: skip
