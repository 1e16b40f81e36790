"""A hyperparameter search in which each trial is a TrainingJob. Started again, it goes on where it was.

python search.py trainingjob.yaml --study digits --trials 20 --parallel 4
"""

import argparse
import re

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from spottrain_cli import Client, JobFailed
from spottrain_cli.errors import NotFound

EVALUATION = re.compile(r"event=evaluated step=(\d+) .*eval_loss=(\S+)")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("manifest")
parser.add_argument("--study", required=True)
parser.add_argument("--trials", type=int, default=20)
parser.add_argument("--parallel", type=int, default=4)
given = parser.parse_args()

client = Client()
with open(given.manifest) as file:
    template = yaml.safe_load(file)
storage = JournalStorage(JournalFileBackend(f"{given.study}.journal"))
study = optuna.create_study(study_name=given.study, storage=storage, load_if_exists=True)


def objective(trial: optuna.Trial) -> float:
    optimizer = {
        "name": "adamw",
        "learningRate": trial.suggest_float("learningRate", 1e-5, 1e-1, log=True),
        "weightDecay": trial.suggest_float("weightDecay", 1e-4, 1.0, log=True),
    }
    name = trial.user_attrs.get("job", f"{given.study}-{trial.number}")
    trial.set_user_attr("job", name)
    job = client.job(name)
    try:
        job.status()
    except NotFound:
        training = template["spec"].get("training", {}) | {"optimizer": optimizer}
        spec = template["spec"] | {"training": training}
        client.submit(template | {"metadata": {"name": name}, "spec": spec})
    loss = float("nan")
    for line in job.logs(follow=True):  # of all attempts, until the job has settled
        if found := EVALUATION.search(line):
            loss = float(found[2])
            trial.report(loss, step=int(found[1]))
            if trial.should_prune():
                job.stop()  # with a checkpoint: `spottrain resume NAME` goes on from there
                raise optuna.TrialPruned
    job.result()  # raises JobFailed unless it succeeded
    return loss


for cut_off in study.get_trials(states=[TrialState.RUNNING]):  # when an earlier search.py ended
    study.enqueue_trial(cut_off.params, user_attrs=cut_off.user_attrs)
    study.tell(cut_off.number, state=TrialState.FAIL)
done = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
if done < given.trials:
    study.optimize(objective, given.trials - done, n_jobs=given.parallel, catch=JobFailed)
print(f"{study.best_trial.user_attrs['job']}: {study.best_value:.4g} with {study.best_params}")
