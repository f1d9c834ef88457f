"""Limits, kinds and remedies that several rules share: one for each principle."""

# --- how many values ------------------------------------------------------------------------------

LENGTH = 100  # of a window; tried 50 and 200
LONG = 50  # steps that what comes and goes with the batches does not last
LATEST = 20  # steps, or losses, that a window excludes; an effect is seen by then; tried 10 and 40
FEWEST = 10  # values of a window: their range is 3.1 deviations, that of a hundred 5.0
FEW_SAMPLES = 8  # fewer may be equal by chance, or all the same token; tried 2
RECENT = 5  # losses whose median ignores two outliers, points of a trend; tried 2 and 10
SEVERAL = 3  # in a row, or of a majority: the effect of one batch is over by then; tried 1 and 6
SOON = 2  # steps until a requested full step
AGAIN = 2  # evaluations that confirm each other, the fewest; tried 1 and 4
NAMED = 5  # modules in a sentence
NEVER = 10**9  # steps since an event that never happened

# --- shares ---------------------------------------------------------------------------------------

MOST = 0.75
HALF = 0.5
# Of the trainable elements: an auxiliary head of Inception has an eighth, one of multitask_switch a
# tenth, a pooler of BERT a hundredth; a branch that is detached by mistake usually a third or more.
PART = 0.2
FEW = 0.1  # of all layers, so that one noisy layer does not count; of what was learned
NOISE = 0.03  # of the first loss: less may be noise
ROUNDED = 0.01  # by which equal numbers differ: in bfloat16 by 0.4 %
EXACT = 1e-4  # by which equal numbers differ in float32: a thousand times its rounding
TINY = 1e-3  # of an input, of a norm, of a sum over a batch in float32

# --- growth ---------------------------------------------------------------------------------------

HALF_MORE = 1.5  # times as many examples, or as large outputs
JUMP = 3.0  # of a rate: neither warm restarts nor warm-ups triple the highest; tried 1.5 and 15
THIRTYFOLD = 30.0  # learning does not change a figure by this from step to step; tried 6 and 300
WORSE = 4.0  # deviations: normally distributed losses exceed this once in 30,000 steps; at 0.8 the
# vanishing mlp_tanh20_small is called exploding; tried 2 and 20
FAR_ABOVE = 0.7  # decades: a factor of 5; tried 0.14 and 3.5
TENFOLD = 1.0  # decades: most healthy spikes of faultbench stay below it; tried 0.2 and 5
DEPTH = 1e4  # growth through a network; at 1e5 resnet_nonorm_explodes is found a step later
# Share of its norm by which a step moves the median matrix: 0.1 alarms in the healthy
# rare_positive_weighted; tried 0.4.
LARGE_STEP = 0.2
LARGE_INPUT = 10.0  # exp of it is 22,000, and tanh has slope 1e-8 there; tried 2 and 50

# --- kinds ----------------------------------------------------------------------------------------

EXPLOSIONS = frozenset({"exploding_gradient", "exploding_activation"})
RISEN_LOSSES = frozenset({"loss_divergence", "loss_spike"})
INACTIVE = frozenset({"dead_units", "saturated_units", "vanishing_gradient", "nonfinite"})
DIVERGED = EXPLOSIONS | RISEN_LOSSES
LOST = DIVERGED | INACTIVE

# --- remedies -------------------------------------------------------------------------------------

WARM_UP = "Lower the learning rate or warm it up"
STANDARDIZE = "Standardize the inputs: subtract their mean, divide by their standard deviation"
CLIP = "Clip gradients (clip_grad_norm_)"
FREEZE = "Freeze layers that should not learn by requires_grad_(False)"
FIX_RATE = (
    "Fix the schedule or lower the learning rate",
    "Resume from a checkpoint before the jump",
)
