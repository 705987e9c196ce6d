"""The table of the verbs of `slipway`, in the order in which users need them."""

from collections.abc import Mapping

from slipway.cli.lazy import Verb

_TUNE = {
    "batch": Verb(
        "slipway.planning.tuning:main",
        "propose the largest and the fastest batch of a device",
        first=("batch",),
    ),
    "learning-rate": Verb(
        "slipway.planning.tuning:main",
        "propose a learning rate by a range test",
        first=("learning-rate",),
    ),
    "serving": Verb(
        "slipway.serving.load_test.__main__:main",
        "find the settings with which the service carries most",
    ),
    "replicas": Verb(
        "slipway.serving.load_test.replicas:main",
        "compute the replicas for a rate from the measured capacity",
    ),
}
_LAUNCH = {
    "slurm": Verb("slipway.cli.launch:slurm", "write slurm.sbatch, for a Slurm cluster"),
    "torchrun": Verb("slipway.cli.launch:torchrun", "write torchrun.sh, to start on every machine"),
    "skypilot": Verb("slipway.cli.launch:skypilot", "write skypilot.yaml, for a rented machine"),
}
_EXPORT = {
    "browser": Verb("slipway.cli.exports:browser", "write a page that answers in the browser"),
    "edge": Verb("slipway.cli.exports:edge", "write a script that needs ONNX Runtime only"),
    "openvino": Verb("slipway.cli.exports:openvino", "write a script that needs OpenVINO only"),
    "triton": Verb("slipway.cli.exports:triton", "write a model repository for NVIDIA's Triton"),
    "kserve": Verb("slipway.cli.exports:kserve", "write an InferenceService of KServe"),
    "mlflow": Verb("slipway.cli.exports:mlflow", "write a model of MLflow"),
    "huggingface": Verb(
        "slipway.cli.exports:huggingface", "write a repository of the Hugging Face hub"
    ),
}
_DATASET = {
    "collect": Verb("slipway.traffic.collect:main", "write logged requests and their labels"),
    "merge": Verb("slipway.data.merge.__main__:main", "add collected rows to the data"),
    "label": Verb(
        "slipway.curation.label_desk:main",
        "choose logged rows, and label them on a page",
        extra="serve-cpu",
    ),
    "erase": Verb(
        "slipway.curation.erasure:main",
        "remove one person's rows, and name the models that saw them",
        extra="train,serve-cpu",
    ),
}
VERBS: Mapping[str, Verb] = {
    "init": Verb("slipway.cli.project:init", "start a project with your data"),
    "check": Verb("slipway.cli.params:check", "check params.yaml, the data and this machine"),
    "params": Verb("slipway.cli.params:show_params", "print the value of every key, or explain it"),
    "set": Verb("slipway.cli.params:set_values", "change values of params.yaml"),
    "run": Verb("slipway.cli.experiments:run", "run the stages, and record the experiment"),
    "compare": Verb("slipway.cli.experiments:compare", "list the experiments and their results"),
    "search": Verb("slipway.cli.search:search", "find better values of params.yaml"),
    "take": Verb("slipway.cli.experiments:take", "make an experiment the workspace"),
    "show": Verb("slipway.cli.experiments:show", "open the reports"),
    "reset": Verb("slipway.cli.experiments:reset", "remove what the stages wrote"),
    "launch": Verb(_LAUNCH, "write a script that trains on several machines"),
    "plan": Verb("slipway.planning.plan:main", "predict memory, disk and time of the training"),
    "profile": Verb("slipway.profiling.profile:main", "find what slows the training down"),
    "tune": Verb(
        _TUNE, "find the batch size, the learning rate, or settings and replicas of the service"
    ),
    "export": Verb(
        _EXPORT,
        "export and certify the trained model again, or write it for another place",
        alone="slipway.cli.model:export",
    ),
    "release": Verb("slipway.cli.model:release", "save the model as the reference of later runs"),
    "verify-bundle": Verb(
        "slipway.cli.model:verify_bundle", "check the files, certificate and signature of a model"
    ),
    "predict": Verb(
        "slipway.cli.answers:predict",
        "answer a folder of images, a table or texts",
        extra="serve-cpu,files",
    ),
    "serve": Verb("slipway.cli.answers:serve", "start the service", extra="serve-cpu"),
    "keys": Verb(
        "slipway.serving.auth.keys:main", "make an API key of the service", extra="serve-cpu"
    ),
    "rollout": Verb(
        "slipway.serving.rollout.__main__:main",
        "replace the model under load, or roll back",
        extra="serve-cpu",
    ),
    "history": Verb(
        "slipway.loop.history:main",
        "print what was served when, and who decided it",
        extra="serve-cpu",
    ),
    "replay": Verb("slipway.replay.__main__:main", "run a logged request again and compare"),
    "dataset": Verb(_DATASET, "build the next data set from the service's traffic"),
    "loop": Verb(
        "slipway.loop.__main__:main",
        "from drift or new labels to a candidate that a person decides on",
        extra="train,serve-cpu",
    ),
}
