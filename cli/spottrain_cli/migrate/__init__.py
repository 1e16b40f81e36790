"""`spottrain init`: a TrainingJob from a Job, PyTorchJob or TrainJob, without a silent loss. Pure.

convert     which kind a file holds, and the TrainingJob that comes of it
job         batch/v1 Job
pytorchjob  PyTorchJob of Kubeflow's training-operator
trainjob    TrainJob of Kubeflow Trainer, with its training runtime
pod         the pod template, which all three have
source      a document whose fields are taken one by one: what nobody took is a loss
text        the manifest as a file with comments
"""
