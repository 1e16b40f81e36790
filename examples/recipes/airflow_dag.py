"""Trains every night; the task ends as the TrainingJob does."""

from datetime import timedelta

import pendulum
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import DAG
from kubernetes.client import models as k8s

with DAG("retrain", schedule="0 2 * * *", start_date=pendulum.datetime(2026, 1, 1), catchup=False):
    KubernetesPodOperator(
        task_id="train",
        namespace="ml",
        service_account_name="run-job",
        image="registry.k8s.io/kubectl:v1.34.4",
        cmds=["bash", "/recipe/run-job.sh"],
        arguments=["retrain-{{ dag_run.run_after.strftime('%Y%m%d%H%M%S') }}", "/recipe/trainingjob.yaml"],
        volumes=[k8s.V1Volume(name="recipe", config_map=k8s.V1ConfigMapVolumeSource(name="run-job"))],
        volume_mounts=[k8s.V1VolumeMount(name="recipe", mount_path="/recipe")],
        retries=3,  # a second try waits for the same job
        execution_timeout=timedelta(hours=72),
    )
