"""Other names that users know from elsewhere, for suggestions; without case and punctuation."""

from __future__ import annotations

from dat.core.mistakes import Synonyms


def _by_name(names_of: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """{name: its settings} from {settings: their names}."""
    by_name: dict[str, tuple[str, ...]] = {}
    for settings, names in names_of.items():
        for name in names.split():
            by_name[name] = (*by_name.get(name, ()), *settings.split())
    return by_name


SETTINGS = {
    "data.name data": "dataset datadir datapath dataroot traindata",
    "data.holdout": "val valsplit valfraction validation validationsplit devsplit",
    "data.limit": "ntrain numtrain subset subsetsize maximages maxtrainimages trainimages",
    "data.size": "imagesize imgsize inputsize resolution",
    "data.augmentation": "augment augmentations aug dataaugmentation",
    "data.loaders": "numworkers nworkers dataworkers",
    "data.test_share": "testsplit testfraction",
    "data.labels": "nlabels numlabels",
    "model.name model": "arch architecture backbone net network modelname",
    "model.activation": "act nonlinearity",
    "threat.eps": "epsilon epsilons radius budget maxeps epstrain",
    "threat.norm": "norm lp pnorm normtype ball",
    "threat": "threatmodel",
    "attack.steps attack.step_size": "step",
    "attack.steps": "steps numsteps nsteps attacksteps pgdsteps iterations iters iter niter nbiter "
    "numiter maxiter attackiters",
    "attack.step_size attack.step_ratio": "alpha stepsize attacklr relstepsize absstepsize "
    "pgdalpha",
    "attack.random_start": "randominit randinit randomstart initrandom",
    "attack.restarts": "numrestarts nrestarts",
    "attack.name": "attackname attacktype",
    "attack": "adversary",
    "objective.name objective": "loss criterion method lossfunction losstype",
    "objective.beta": "tradesbeta",
    "objective.label_smoothing": "smoothing labelsmooth",
    "optimizer.name optimizer": "optim opt solver",
    "optimizer.lr": "learningrate eta baselr lrmax maxlr peaklr initiallr",
    "optimizer.weight_decay": "wd decay l2reg",
    "optimizer.betas": "beta1 beta2",
    "optimizer.clip": "gradclip clipgrad clipnorm gradientclipping clipgradnorm maxgradnorm",
    "schedule.name schedule": "scheduler lrschedule lrscheduler lrpolicy",
    "schedule.warmup": "warmupepochs lrwarmup",
    "schedule.milestones": "lrsteps lrmilestones decayepochs lrdecayepochs",
    "schedule.factor": "gamma lrgamma lrdecay decayrate lrfactor",
    "train.epochs": "numepochs nepochs maxepochs nepoch trainepochs",
    "train.batch": "batchsize bs globalbatch globalbatchsize trainbatch trainbatchsize",
    "train": "training trainer",
    "train.ema": "emadecay averaging",
    "train.awp": "awpgamma",
    "train.bn": "syncbn batchnorm",
    "train.save_every": "checkpointevery savefreq saveinterval checkpointinterval",
    "train.log": "logger loggers",
    "evaluate.attacks": "evalattacks evaluationattack testattack evalattack",
    "evaluate.batch": "evalbatch evalbatchsize testbatch testbatchsize",
    "evaluate.images": "nex nexamples testimages numtest ntest",
    "evaluate": "eval evaluation test",
    "seed": "randomseed manualseed rng",
    "about": "description",
    "compute.precision": "amp mixedprecision dtype fp16 bf16 autocast",
    "compute.compile": "torchcompile jit",
    "compute.recompute": "gradientcheckpointing activationcheckpointing",
    "compute.layout": "channelslast memoryformat",
    "comm.device": "gpu cuda accelerator",
    "comm": "communication distributed ddp",
    "comm.shard": "fsdp",
    "quantizer.bits": "nbits quantbits",
    "quantizer": "quantization compression",
}
"""Settings, or groups, and their other names."""

NAMES = {
    "adam": "adamw",
    "bf16": "bfloat16",
    "bim": "pgd",
    "cosineannealing": "cosine",
    "fp16": "float16",
    "fp32": "float32",
    "freeat": "free",
    "half": "float16",
    "ifgsm": "pgd",
    "inf": "linf",
    "linfinity": "linf",
    "linfty": "linf",
    "euclidean": "l2",
    "madry": "at",
    "multistep": "piecewise",
    "multisteplr": "piecewise",
    "onecyclelr": "one-cycle",
    "pgdat": "at",
    "preresnet18": "preact-resnet18",
    "prn18": "preact-resnet18",
    "rn18": "resnet18",
    "rn50": "resnet50",
    "step": "piecewise",
    "steplr": "piecewise",
    "wideresnet": "wrn-28-10",
    "wideresnet2810": "wrn-28-10",
    "wrn2810": "wrn-28-10",
}
"""Other names of components and choices."""

SYNONYMS = Synonyms(_by_name(SETTINGS), NAMES)
