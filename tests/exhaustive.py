"""Further cases of rules that a quicker test of the same name shows: `make exhaustive` runs them, `make test` does not.

Some are of a rule that only real processes under load show, which takes long or quiet cores. Each pattern is a part of pytest's name
of a test. All of them together take more than an hour on two cores.
"""

import re

PATTERNS = (
    r"test_disks\.py::test_a_disk_that_refuses.*-(nearly full|with a limit)",
    r"test_disks\.py::test_a_disk_that_refuses.*(split|precompute|augment|evaluate|compile|verify)-full",
    r"test_disks\.py::test_a_disk_that_refuses.*\[(?!train)\w+-(read-only|without)",
    r"test_faults\.py::test_a_rank_that_fails.*\[(1:segfault|1:exit|1:memory|1:disk|0:error|0:memory|0:host memory)",
    r"test_faults\.py::test_torchrun.*\[(0:kill|1:error|1:memory)",
    r"test_guard\.py::test_all_ranks_skip.*\[(ddp-2-bf16|deepspeed_stage_1|deepspeed_stage_2-2-bf16|deepspeed_stage_3-2-(32|bf16))",
    r"test_guard\.py::test_a_gradient_of_one_rank.*\[(deepspeed_stage_1|deepspeed_stage_2)",
    r"test_guard\.py::test_a_resumed_run_counts_on.*\[zero 2",
    r"test_recipe_runs\.py::test_a_killed_training_ends.*\[(sgd|step)",
    r"test_recipe_runs\.py::test_a_frozen_backbone.*\[(ddp|deepspeed_stage_1)",
    r"test_recipe_runs\.py::test_two_processes_average.*\[deepspeed_stage_(1|2-bf16)",
    r"test_recipe_runs\.py::test_(weights_that_were_freed|another_file_of_weights|a_killed_deepspeed_training_resumes)",
    r"test_run\.py::test_two_processes_reach.*\[(deepspeed_stage_1-bf16|deepspeed_stage_3)",
    r"test_run\.py::test_accumulated_gradients.*\[deepspeed_stage_(1|3)",
    r"test_run\.py::test_a_killed_deepspeed_training.*\[deepspeed_stage_2-none",
    r"test_other_processes\.py::test_two_processes_killed.*\[deepspeed_stage_(1|3)",
    r"test_other_processes\.py::test_one_process_two.*\[deepspeed_stage_(1|2)",
    r"test_other_processes\.py::test_deepspeed_goes_on",
    r"test_stopping\.py::test_whichever_process.*\[(first|all)",
    r"test_exact_resumption\.py::test_a_damaged_save.*\[_(truncate|exchange)",
    r"test_execution\.py::test_(a_compiled_training_that_was_killed|two_processes_train_compiled)",
    r"test_doctor\.py::test_(a_training_that_nothing_slows|communication_of_two)",
    r"test_plan\.py::test_the_predicted_memory.*\[(timm|tabm|small_resnet.*bf16)",
    r"test_telemetry\.py::test_deepspeed_tells.*\[2",
    r"test_kills\.py",
    r"test_audit_stage\.py::test_most_planted.*\[images",
    r"test_two_nodes\.py::test_(slurm|launchers_that_reach.*settings2)",
    r"test_two_processes_reach.*\[deepspeed_stage_2-bf16",
    r"test_recipe_runs\.py::test_two_processes_average.*\[deepspeed_stage_2-16",
    r"test_doctor\.py::test_a_slow_part_is_named.*\[disk",
    r"test_tables\.py::test_a_table_goes_from_packed_rows.*\[table_classification",
    r"test_pruning\.py::test_a_network_of_timm.*\[(test_vit|test_efficientnet)",
    r"test_rollout_processes\.py::test_swaps_of_a_real.*\[60",
    r"test_rollout_law\.py::test_of_rollouts_without.*\[1000",
    r"test_bento\.py::test_it_serves_with_nothing_but",
    r"test_watching_service\.py::test_whatever_refuses",
    r"test_service_faults\.py::test_a_fault_in_the_columns.*\[wrong (category code|imputation)",
    r"test_killed_workers\.py::test_killed_workers.*\[20",
    r"test_under_fire\.py::test_(generated_requests.*\[10000|one_bad_image.*\[1000)",
    r"test_steady\.py::test_memory.*\[2000-50000",
    r"test_draining\.py::test_(a_rolling_restart.*\[3000|without_a_drain_the_same_restart)",
    r"test_audit_stage\.py::test_other_params_do_not",
    r"test_audit_stage\.py::test_a_killed_audit",
    r"test_other_processes\.py::test_two_processes_killed.*\[deepspeed_stage_2",
    r"test_other_processes\.py::test_one_process_two.*\[deepspeed_stage_3",
    r"test_recipe_runs\.py::test_frozen_parts",
    r"test_guard\.py::test_a_gradient_of_one_rank.*\[deepspeed_stage_3",
    r"test_guard\.py::test_all_ranks_skip.*\[(deepspeed_stage_2|single)",
    r"test_faults\.py::test_a_rank_that_fails.*\[1:error",
    r"test_faults\.py::test_torchrun",
    r"test_disks\.py::test_what_is_run_here",
    r"test_run\.py::test_accumulated_gradients.*\[deepspeed",
    r"test_tensorrt_engine\.py::test_so_does_every_variant_of_a_network_of_timm",
    r"test_remote_data\.py::test_an_added_folder",
    r"test_overload\.py",
    r"test_draining\.py::test_a_rolling_restart",
    r"test_killed_workers\.py",
    r"test_rollout_processes\.py::test_swaps_of_a_real",
    r"test_watching_service\.py::test_each_row_counts_once",
    r"test_counts\.py::test_the_counters_of_all_workers.*\[1",
    r"test_process_metrics\.py::test_a_worker_that_is_started_again",
    r"test_page_in_browser\.py",
    r"test_readme\.py::test_the_experiment_commands_run",
    r"test_loading_speed\.py::test_images_of_28_px",
    r"test_data_stages\.py::test_a_precompute_killed.*\[jpeg",
    r"test_draining\.py::test_after_sigterm_it_is_not_ready.*\[1\]",
    r"test_service_faults\.py::test_a_fault_in_the_services_decoding.*\[another filter",
)
_PATTERN = re.compile("|".join(PATTERNS))


def is_exhaustive(name: str) -> bool:
    """Whether the test of that name is one of them."""
    return _PATTERN.search(name) is not None
