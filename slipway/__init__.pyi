# For type checkers. An import of these in __init__.py, which every module runs, would make each
# stage's code digest cover slipway/inference.
from slipway.inference.client import Client as Client
from slipway.inference.files import predict_files as predict_files
from slipway.inference.local import LoadedModel as LoadedModel
from slipway.inference.local import load as load
from slipway.inference.predictions import ClassPrediction as ClassPrediction
from slipway.inference.predictions import Explanation as Explanation
from slipway.inference.predictions import ValuePrediction as ValuePrediction
