# For type checkers. An import of these in __init__.py, which every module runs, would make each
# stage's code digest cover slipway/inference.
from slipway.inference.client import Client as Client
from slipway.inference.client import ServiceError as ServiceError
from slipway.inference.files import PredictedFile as PredictedFile
from slipway.inference.files import predict_files as predict_files
from slipway.inference.local import LoadedModel as LoadedModel
from slipway.inference.local import load as load
from slipway.inference.predictions import ClassPrediction as ClassPrediction
from slipway.inference.predictions import Explanation as Explanation
from slipway.inference.predictions import LabelsPrediction as LabelsPrediction
from slipway.inference.predictions import Prediction as Prediction
from slipway.inference.predictions import Predictions as Predictions
from slipway.inference.predictions import ValuePrediction as ValuePrediction
from slipway.system.errors import BundleError as BundleError
from slipway.system.errors import DataError as DataError
from slipway.system.errors import SlipwayError as SlipwayError
from slipway.system.errors import UnavailableError as UnavailableError
