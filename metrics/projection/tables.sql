-- The metrics file: one table for each kind of event in schema `log` (rows are only ever added; the first occurrence
-- of an id wins by primary key), and public tables and views derived from them. What follows the line "-- views" is
-- made anew when it has changed; a change before it makes the projector read the log from its start again.
-- Every log table says where its event lies (log_partition, log_offset) and its event time (time_ms, UTC); those of
-- runs, jobs, epochs, tasks, groups and weights also when it was written (recorded_ms, wall time of the writer).

CREATE SCHEMA log;

CREATE TABLE log.meta (name VARCHAR PRIMARY KEY, value VARCHAR NOT NULL);

CREATE TABLE main.offsets (
    topic VARCHAR, "partition" BIGINT, next_offset BIGINT NOT NULL, updated_at TIMESTAMP NOT NULL,
    PRIMARY KEY (topic, "partition")
);

-- groups

CREATE TABLE log.run_started (
    run_id VARCHAR PRIMARY KEY, name VARCHAR, config JSON, seed BIGINT, dataset_uri VARCHAR, dataset_sha256 VARCHAR,
    num_examples BIGINT, num_partitions BIGINT, library_versions JSON, parent_run_id VARCHAR, parent_version BIGINT,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.run_ended (
    run_id VARCHAR PRIMARY KEY, cause VARCHAR, message VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.job_started (
    job_id VARCHAR PRIMARY KEY, run_id VARCHAR, model_group VARCHAR, base_version BIGINT, num_epochs BIGINT,
    plan JSON, rollout JSON, policy VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.epoch_started (
    job_id VARCHAR, epoch BIGINT, run_id VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, epoch)
);
CREATE TABLE log.submission_received (
    submission_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, epoch BIGINT, num_groups BIGINT,
    num_trajectories BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.rollback_requested (
    job_id VARCHAR, version BIGINT, after_version BIGINT, run_id VARCHAR, model_group VARCHAR, reason VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, version, after_version)
);
CREATE TABLE log.group_closed (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, example_id VARCHAR, epoch BIGINT, task_index BIGINT,
    purpose VARCHAR, policy VARCHAR, reason VARCHAR, void_cause VARCHAR, is_viable BOOLEAN, size BIGINT,
    num_members BIGINT, mean_reward DOUBLE, last_step_offset BIGINT,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.group_member (
    trajectory_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, rollout_id VARCHAR, agent VARCHAR,
    member BIGINT, digest VARCHAR, reward DOUBLE, num_tokens BIGINT, num_completion_tokens BIGINT, min_version BIGINT,
    max_version BIGINT, num_without_logprobs BIGINT, num_dead_tokens BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.attempt_settled (
    rollout_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, member BIGINT, attempt BIGINT, outcome VARCHAR,
    cause VARCHAR, num_tokens BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.match_seat (
    group_id VARCHAR, member BIGINT, seat VARCHAR, run_id VARCHAR, player VARCHAR, score DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (group_id, member, seat)
);

-- tasks, steps, trajectories

CREATE TABLE log.task_requested (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, example_id VARCHAR, epoch BIGINT, task_index BIGINT,
    purpose VARCHAR, num_rollouts BIGINT, minimum BIGINT, seed BIGINT, min_version BIGINT, environment VARCHAR,
    policy VARCHAR, inputs VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.task_cancelled (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, cause VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.group_started (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, example_id VARCHAR, epoch BIGINT, task_index BIGINT,
    purpose VARCHAR, policy VARCHAR, size BIGINT, minimum BIGINT, timeout_ms BIGINT, void_cause VARCHAR, owner VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.rollout_started (
    rollout_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, member BIGINT, attempt BIGINT, seed BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.rollout_finished (
    rollout_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, state VARCHAR, num_steps BIGINT,
    num_rewards BIGINT, stop_reason VARCHAR, cause VARCHAR, message VARCHAR, is_final BOOLEAN, digest VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.step_recorded (
    rollout_id VARCHAR, step_index BIGINT, run_id VARCHAR, group_id VARCHAR, agent VARCHAR, event_type VARCHAR,
    name VARCHAR, parent_id VARCHAR, framework VARCHAR, seconds DOUBLE, input VARCHAR, output VARCHAR, usage JSON,
    metadata JSON,
    num_prompt_tokens BIGINT, num_new_prompt_tokens BIGINT, num_completion_tokens BIGINT, model_group VARCHAR,
    min_version BIGINT, max_version BIGINT, finish_reason VARCHAR, prefix_step BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (rollout_id, step_index)
);
CREATE TABLE log.reward_recorded (
    rollout_id VARCHAR, reward_index BIGINT, run_id VARCHAR, group_id VARCHAR, name VARCHAR, value DOUBLE,
    step_index BIGINT, agent VARCHAR, is_score BOOLEAN,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (rollout_id, reward_index)
);
CREATE TABLE log.trajectory_assembled (
    trajectory_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, rollout_id VARCHAR, agent VARCHAR,
    model_group VARCHAR, member BIGINT, attempt BIGINT, example_id VARCHAR, job_id VARCHAR, epoch BIGINT,
    purpose VARCHAR, policy VARCHAR, reward DOUBLE, rewards JSON, num_steps BIGINT, num_sequences BIGINT,
    num_tokens BIGINT, num_completion_tokens BIGINT, min_version BIGINT, max_version BIGINT, digest VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);

-- batches

CREATE TABLE log.batch_planned (
    batch_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, model_group VARCHAR, epoch BIGINT,
    batch_index BIGINT, trains_at_version BIGINT, version BIGINT, num_trajectories BIGINT, num_groups BIGINT,
    seed BIGINT, curriculum_sha256 VARCHAR, previous_sha256 VARCHAR, digest VARCHAR, adopts BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.batch_member (
    batch_id VARCHAR, position BIGINT, run_id VARCHAR, group_id VARCHAR, rollout_id VARCHAR, trajectory_id VARCHAR,
    digest VARCHAR, reward DOUBLE, staleness BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (batch_id, position)
);
CREATE TABLE log.trajectory_rejected (
    trajectory_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, epoch BIGINT, group_id VARCHAR,
    rollout_id VARCHAR, cause VARCHAR, num_tokens BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.epoch_sealed (
    job_id VARCHAR, epoch BIGINT, run_id VARCHAR, is_last BOOLEAN, num_groups BIGINT, num_trained_groups BIGINT,
    num_batches BIGINT, avg_reward DOUBLE, filtered_avg_reward DOUBLE, zero_variance_groups BIGINT,
    curriculum_percentile DOUBLE, curriculum_sha256 VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, epoch)
);

CREATE TABLE log.version_judged (
    job_id VARCHAR, epoch BIGINT, run_id VARCHAR, model_group VARCHAR, version BIGINT, reward DOUBLE,
    num_groups BIGINT, is_good BOOLEAN, good_version BIGINT, best_reward DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, epoch)
);

-- jobs, weights, dlq

CREATE TABLE log.job_submitted (
    job_id VARCHAR PRIMARY KEY, run_id VARCHAR, model_group VARCHAR, kind VARCHAR, algorithm VARCHAR, model VARCHAR,
    base_version BIGINT, num_versions BIGINT, settings JSON,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.job_progressed (
    job_id VARCHAR, version BIGINT, run_id VARCHAR, percent DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, version)
);
CREATE TABLE log.job_finished (
    job_id VARCHAR, state VARCHAR, run_id VARCHAR, final_version BIGINT, error VARCHAR,
    finish_s DOUBLE,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, state)
);
CREATE TABLE log.job_skipped (
    job_id VARCHAR PRIMARY KEY, run_id VARCHAR, model_group VARCHAR, job_kind VARCHAR, cause VARCHAR,
    num_examples BIGINT, min_examples BIGINT, version BIGINT, name VARCHAR,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.model_switched (
    job_id VARCHAR PRIMARY KEY, run_id VARCHAR, model_group VARCHAR, version BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.learner_claimed (
    model_group VARCHAR, term BIGINT, learner VARCHAR, run_id VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, term, learner)
);
CREATE TABLE log.step_trained (
    model_group VARCHAR, version BIGINT, term BIGINT, run_id VARCHAR, job_id VARCHAR, batch_id VARCHAR, epoch BIGINT,
    weights_sha256 VARCHAR, num_optimizer_steps BIGINT, metrics MAP(VARCHAR, DOUBLE), seconds MAP(VARCHAR, DOUBLE),
    tokens_per_s DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, term, job_id)
);
CREATE TABLE log.reference_scored (
    model_group VARCHAR, version BIGINT, term BIGINT, trajectory_sha256 VARCHAR, scorer_sha256 VARCHAR, part BIGINT,
    run_id VARCHAR, job_id VARCHAR, batch_id VARCHAR, trajectory_id VARCHAR, num_parts BIGINT, role VARCHAR,
    model VARCHAR, temperature DOUBLE, context VARCHAR, num_tokens BIGINT, mean_logprob DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, term, trajectory_sha256, scorer_sha256, part)
);
CREATE TABLE log.weights_published (
    model_group VARCHAR, version BIGINT, term BIGINT, run_id VARCHAR, job_id VARCHAR, batch_id VARCHAR, parent BIGINT,
    weights_sha256 VARCHAR, weights_format VARCHAR, base_model VARCHAR, uri VARCHAR, size_bytes BIGINT, adopts BIGINT,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, term)
);
CREATE TABLE log.weights_loaded (
    model_group VARCHAR, version BIGINT, engine VARCHAR, run_id VARCHAR, num_skipped BIGINT, seconds DOUBLE,
    recorded_ms BIGINT, time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, engine)
);
CREATE TABLE log.weights_collected (
    model_group VARCHAR, version BIGINT, weights_sha256 VARCHAR, run_id VARCHAR, "by" VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, weights_sha256)
);
CREATE TABLE log.dead_letter (
    log_partition BIGINT, log_offset BIGINT, run_id VARCHAR, topic VARCHAR, "partition" BIGINT, "offset" BIGINT,
    service VARCHAR, stage VARCHAR, error_type VARCHAR, reason VARCHAR, key VARCHAR, size_bytes BIGINT, headers JSON,
    time_ms BIGINT,
    PRIMARY KEY (log_partition, log_offset)
);

-- derived in the transaction that adds the rows above (attempts.py): what is known of each attempt, in one row

CREATE TABLE log.attempt (
    rollout_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, is_known BOOLEAN, state VARCHAR, cause VARCHAR,
    end_offset BIGINT, last_offset BIGINT, step_tokens BIGINT, settled VARCHAR, settled_cause VARCHAR,
    settled_tokens BIGINT, member_tokens BIGINT, is_rejected BOOLEAN, rejected_cause VARCHAR, rejected_tokens BIGINT,
    is_planned BOOLEAN, is_trained BOOLEAN
);

-- views

CREATE OR REPLACE MACRO log.at(ms) AS
    make_timestamp(CASE WHEN ms > 253402300799000 THEN 253402300799000 WHEN ms < 0 THEN 0 ELSE ms END * 1000);
-- A sum of integers, the nearest that a BIGINT can hold: one record with huge numbers must not fail a view for every run.
CREATE OR REPLACE MACRO log.total(num) AS CASE WHEN count(num) > 0
    THEN least(greatest(sum(num), -9223372036854775808), 9223372036854775807)::BIGINT END;
-- The rule of eventlog/terms.py for views: an event is void if a higher term was claimed before it.
CREATE OR REPLACE MACRO log.is_void(of_group, of_term, at_offset) AS EXISTS (SELECT 1 FROM log.learner_claimed c
    WHERE c.model_group = of_group AND c.term > of_term AND c.log_offset < at_offset);

CREATE OR REPLACE VIEW runs AS
SELECT s.run_id, s.name, coalesce(e.cause, 'running') AS state, e.message, log.at(s.recorded_ms) AS started_at,
    log.at(e.recorded_ms) AS ended_at, (e.recorded_ms - s.recorded_ms) / 1000 AS seconds, s.seed, s.num_examples,
    s.num_partitions, s.parent_run_id, s.parent_version, s.dataset_uri, s.dataset_sha256, s.config, s.library_versions,
    log.at(s.time_ms) AS started_event_time, log.at(e.time_ms) AS ended_event_time
FROM log.run_started s LEFT JOIN log.run_ended e USING (run_id)
ORDER BY s.recorded_ms, s.run_id;

CREATE OR REPLACE VIEW jobs AS
SELECT coalesce(s.run_id, b.run_id, k.run_id) AS run_id, job_id,
    coalesce(s.kind, k.job_kind, if(b.policy = 'demonstration', 'sft', 'rl')) AS kind,
    CASE WHEN f.state IS NOT NULL THEN f.state WHEN k.job_id IS NOT NULL THEN 'skipped'
        WHEN e.run_id IS NOT NULL THEN 'cancelled'  -- no learner was left to say it
        WHEN p.version IS NOT NULL OR b.job_id IS NOT NULL THEN 'running' ELSE 'submitted' END AS state,
    if(f.state = 'succeeded', 100.0, coalesce(p.percent, 0.0)) AS percent, coalesce(f.final_version, p.version, k.version) AS version,
    w.version AS adopted_version, coalesce(s.model_group, b.model_group, k.model_group) AS model_group,
    coalesce(b.base_version, s.base_version, k.version) AS base_version, b.num_epochs, s.num_versions, s.algorithm, s.model,
    CASE WHEN f.state IS NOT NULL THEN f.error WHEN k.job_id IS NOT NULL
        THEN k.num_examples || ' examples, at least ' || k.min_examples || ' are needed'
        WHEN e.run_id IS NOT NULL THEN 'the run ended' END AS error,
    log.at(coalesce(s.recorded_ms, b.recorded_ms, k.recorded_ms)) AS started_at,
    log.at(coalesce(f.recorded_ms, k.recorded_ms, e.recorded_ms)) AS ended_at,
    f.finish_s, s.settings, b.plan, b.rollout, log.at(coalesce(s.time_ms, b.time_ms, k.time_ms)) AS started_event_time,
    log.at(coalesce(f.time_ms, k.time_ms, e.time_ms)) AS ended_event_time
FROM log.job_submitted s FULL JOIN log.job_started b USING (job_id) FULL JOIN log.job_skipped k USING (job_id)
LEFT JOIN log.model_switched w USING (job_id)
LEFT JOIN (SELECT job_id, max(version) AS version, max(percent) AS percent FROM log.job_progressed GROUP BY job_id) p
    USING (job_id)
LEFT JOIN (SELECT * FROM log.job_finished QUALIFY row_number() OVER (PARTITION BY job_id ORDER BY log_offset) = 1) f
    USING (job_id)
LEFT JOIN log.run_ended e ON e.run_id = coalesce(s.run_id, b.run_id, k.run_id)
ORDER BY coalesce(s.recorded_ms, b.recorded_ms, k.recorded_ms), job_id;

CREATE OR REPLACE VIEW tasks AS
SELECT t.run_id, t.group_id, t.job_id, t.example_id, t.epoch, t.task_index, t.purpose, t.num_rollouts, t.minimum,
    t.min_version, t.environment, t.policy, t.seed, t.inputs, log.at(t.time_ms) AS requested_at,
    c.cause AS cancelled_cause, log.at(c.time_ms) AS cancelled_at
FROM log.task_requested t LEFT JOIN log.task_cancelled c USING (group_id);

CREATE OR REPLACE VIEW groups AS
SELECT coalesce(c.run_id, s.run_id) AS run_id, group_id, coalesce(c.job_id, s.job_id) AS job_id,
    coalesce(c.example_id, s.example_id) AS example_id, coalesce(c.epoch, s.epoch) AS epoch,
    coalesce(c.task_index, s.task_index) AS task_index, coalesce(c.purpose, s.purpose) AS purpose,
    coalesce(c.policy, s.policy) AS policy, if(c.group_id IS NULL, 'open', 'closed') AS state, c.reason,
    coalesce(c.void_cause, s.void_cause) AS void_cause, c.is_viable, coalesce(c.size, s.size) AS size, c.num_members,
    c.mean_reward, m.reward_std, m.num_tokens, m.min_version, m.max_version, log.at(s.time_ms) AS started_at,
    log.at(c.time_ms) AS closed_at, s.owner, (s.recorded_ms - t.recorded_ms) / 1000 AS wait_seconds
FROM log.group_closed c FULL JOIN log.group_started s USING (group_id)
LEFT JOIN log.task_requested t USING (group_id)
LEFT JOIN (
    SELECT group_id, log_offset, stddev_pop(reward) AS reward_std, log.total(num_tokens) AS num_tokens,
        -- of a member without a sampled token they say 0
        min(min_version) FILTER (num_completion_tokens > 0) AS min_version,
        max(max_version) FILTER (num_completion_tokens > 0) AS max_version
    FROM log.group_member GROUP BY group_id, log_offset
) m ON m.group_id = c.group_id AND m.log_offset = c.log_offset;

-- Jobs that an epoch's tasks are for: the job that planned them (tasks_of) and, with several model groups, those beside.
CREATE OR REPLACE VIEW log.task_jobs AS
SELECT coalesce(nullif(plan->>'tasks_of', ''), job_id) AS tasks_of, job_id, model_group FROM log.job_started;

-- The job that trains an agent's trajectories; none if the agent's model group is frozen.
CREATE OR REPLACE VIEW log.agent_jobs AS
SELECT a.tasks_of, a.agent, j.job_id FROM (
    -- a map, since an agent's name may be what JSON paths give a meaning to
    SELECT tasks_of, unnest(map_keys(agents)) AS agent, unnest(map_values(agents)) AS model_group FROM (
        SELECT job_id AS tasks_of, (rollout->'agents')::MAP(VARCHAR, VARCHAR) AS agents
        FROM log.job_started WHERE coalesce(plan->>'tasks_of', '') = ''
    )
) a LEFT JOIN log.task_jobs j USING (tasks_of, model_group);

CREATE OR REPLACE VIEW log.members AS
SELECT m.*, if(o.agent IS NULL, c.job_id, o.job_id) AS job_id, c.example_id, c.epoch, c.task_index, c.purpose, c.policy,
    c.is_viable
FROM log.group_member m
JOIN log.group_closed c ON m.run_id = c.run_id AND m.group_id = c.group_id AND m.log_offset = c.log_offset
LEFT JOIN log.agent_jobs o ON o.tasks_of = c.job_id AND o.agent = m.agent;

CREATE OR REPLACE VIEW rollouts AS
SELECT coalesce(s.run_id, f.run_id) AS run_id, rollout_id, coalesce(s.group_id, f.group_id) AS group_id, g.job_id,
    g.example_id, g.epoch, g.purpose, g.policy, s.member, s.attempt,
    coalesce(f.state, if(g.state = 'closed' OR e.run_id IS NOT NULL, 'dead', 'running')) AS state, m.reward,
    f.num_steps, f.num_rewards, f.stop_reason, f.cause, f.message, f.is_final, s.seed,
    log.at(s.time_ms) AS started_at, log.at(f.time_ms) AS ended_at, (f.time_ms - s.time_ms) / 1000 AS seconds
FROM log.rollout_started s FULL JOIN log.rollout_finished f USING (rollout_id)
LEFT JOIN groups g ON g.group_id = coalesce(s.group_id, f.group_id)
LEFT JOIN (SELECT rollout_id, avg(reward) AS reward FROM log.members GROUP BY rollout_id) m USING (rollout_id)
LEFT JOIN log.run_ended e ON e.run_id = s.run_id;

CREATE OR REPLACE VIEW steps AS
SELECT run_id, group_id, rollout_id, step_index, agent, event_type, name, input, output, usage, num_prompt_tokens,
    num_new_prompt_tokens, num_completion_tokens, model_group, min_version, max_version, finish_reason, parent_id,
    framework, metadata, seconds, log.at(time_ms) AS recorded_at, log_partition, log_offset
FROM log.step_recorded;

CREATE OR REPLACE VIEW rewards AS
SELECT run_id, group_id, rollout_id, reward_index, name, value, step_index, agent, log.at(time_ms) AS recorded_at,
    log_partition, log_offset, is_score
FROM log.reward_recorded;

CREATE OR REPLACE VIEW trajectories AS
SELECT run_id, trajectory_id, group_id, rollout_id, agent, model_group, member, attempt, example_id, job_id, epoch,
    purpose, policy, reward, rewards, num_steps, num_sequences, num_tokens, num_completion_tokens, min_version,
    max_version, digest, log.at(time_ms) AS assembled_at, log_partition, log_offset
FROM log.trajectory_assembled;

CREATE OR REPLACE VIEW rejections AS
SELECT run_id, trajectory_id, rollout_id, group_id, job_id, epoch, cause, num_tokens, log.at(time_ms) AS rejected_at
FROM log.trajectory_rejected;

CREATE OR REPLACE VIEW weight_versions AS
SELECT w.run_id, w.model_group, w.version, w.parent, w.job_id, w.batch_id, w.weights_sha256, w.weights_format,
    w.base_model, w.uri, w.size_bytes, w.term, log.at(w.recorded_ms) AS published_at, g.version IS NOT NULL AS is_collected,
    log.at(g.time_ms) AS collected_at, g."by" AS collected_by, w.adopts, log.at(w.time_ms) AS published_event_time
FROM log.weights_published w LEFT JOIN log.weights_collected g
    ON g.model_group = w.model_group AND g.version = w.version AND g.weights_sha256 = w.weights_sha256
WHERE NOT log.is_void(w.model_group, w.term, w.log_offset)
QUALIFY row_number() OVER (PARTITION BY w.model_group, w.version ORDER BY w.log_offset) = 1
ORDER BY w.model_group, w.version;

-- The first step of a version in each job: a job may be closed before it publishes its last one, and the next job trains a
-- version of the same number. GroupState.step_of in learner/progress.py implements the same rule.
CREATE OR REPLACE VIEW log.steps_of_jobs AS
SELECT * FROM log.step_trained t WHERE NOT log.is_void(t.model_group, t.term, t.log_offset)
QUALIFY row_number() OVER (PARTITION BY t.model_group, t.version, t.job_id ORDER BY t.log_offset) = 1;

-- The step of a version is of the job that published it, else of the last job that trained it.
CREATE OR REPLACE VIEW training_steps AS
SELECT t.run_id, t.job_id, t.epoch, t.version, t.batch_id, t.model_group, t.metrics['loss/total'] AS loss, t.metrics,
    t.num_optimizer_steps, t.tokens_per_s, t.seconds, t.weights_sha256, t.term, log.at(t.time_ms) AS trained_at,
    t.metrics['dpo/accuracy'] AS preference_accuracy, t.metrics['dpo/margin'] AS preference_margin
FROM log.steps_of_jobs t LEFT JOIN weight_versions w ON w.model_group = t.model_group AND w.version = t.version
QUALIFY row_number() OVER (PARTITION BY t.model_group, t.version
    ORDER BY coalesce(w.job_id = t.job_id, false) DESC, t.log_offset DESC) = 1
ORDER BY t.model_group, t.version;

CREATE OR REPLACE VIEW engine_mismatch AS
SELECT run_id, job_id, model_group, version - 1 AS trained_version, metrics['mismatch/kl_k3'] AS mismatch_kl,
    metrics['mismatch/log_ppl_diff'] AS log_ppl_diff, metrics['mismatch/ess'] AS mismatch_ess,
    metrics['drift/kl_k3'] AS drift_kl, metrics['drift/ess'] AS drift_ess, metrics['drift/tokens'] AS drift_share,
    metrics['drift/versions'] AS versions_old, coalesce(metrics['mismatch/kl_k3'] > 0.01, false) AS is_alarming,
    metrics['mismatch/chi2'] AS mismatch_chi2, metrics['drift/chi2'] AS drift_chi2
FROM training_steps WHERE metrics['drift/tokens'] IS NOT NULL ORDER BY model_group, version;

-- A trajectory's log-probabilities under a reference or a teacher: one row a trajectory and scorer, the first that counts.
CREATE OR REPLACE VIEW reference_scores AS
WITH first AS (
    SELECT * FROM log.reference_scored s
    WHERE NOT log.is_void(s.model_group, s.term, s.log_offset)
    QUALIFY row_number() OVER (PARTITION BY s.model_group, s.trajectory_sha256, s.scorer_sha256, s.part
        ORDER BY s.log_offset) = 1
)
SELECT run_id, job_id, model_group, min(version) AS version, min(batch_id) AS batch_id, trajectory_id, role, model,
    temperature, context, log.total(num_tokens) AS num_tokens,
    CASE WHEN bool_and(mean_logprob IS NOT NULL OR num_tokens = 0)
        THEN sum(mean_logprob * num_tokens) / nullif(sum(num_tokens), 0) END AS mean_logprob, log.at(max(time_ms)) AS scored_at
FROM first
GROUP BY run_id, job_id, model_group, trajectory_id, trajectory_sha256, scorer_sha256, role, model, temperature, context
HAVING count(*) = max(num_parts)
ORDER BY model_group, version, trajectory_id, role, model, temperature, context, trajectory_sha256, job_id, run_id;

CREATE OR REPLACE VIEW weight_loads AS
SELECT run_id, model_group, version, engine, seconds, num_skipped, log.at(recorded_ms) AS loaded_at
FROM log.weights_loaded ORDER BY log_offset;

CREATE OR REPLACE VIEW batches AS
SELECT b.run_id, b.batch_id, b.job_id, b.epoch, b.batch_index, b.trains_at_version, b.version, b.num_trajectories,
    b.num_groups, t.batch_id IS NOT NULL AS is_trained, b.model_group, b.seed, b.curriculum_sha256, b.previous_sha256,
    b.digest, log.at(b.time_ms) AS planned_at, log.at(t.time_ms) AS trained_at, b.adopts
FROM log.batch_planned b
LEFT JOIN (SELECT batch_id, any_value(time_ms) AS time_ms FROM log.steps_of_jobs GROUP BY batch_id) t USING (batch_id)
ORDER BY b.log_offset;

CREATE OR REPLACE VIEW rollbacks AS
WITH planned AS (
    SELECT run_id, job_id, model_group, adopts, version, time_ms,
        coalesce(lag(version) OVER (PARTITION BY job_id ORDER BY version), 0) AS earlier_rollback
    FROM log.batch_planned WHERE adopts IS NOT NULL
), newest AS (SELECT job_id, max(version) AS version FROM planned GROUP BY job_id)
SELECT coalesce(p.run_id, r.run_id) AS run_id, coalesce(p.model_group, r.model_group) AS model_group,
    coalesce(p.job_id, r.job_id) AS job_id, coalesce(p.adopts, r.version) AS adopts, p.version,
    CASE WHEN w.version IS NOT NULL THEN 'published' WHEN p.version IS NOT NULL THEN 'planned'
        WHEN r.after_version < n.version THEN 'superseded' WHEN e.run_id IS NOT NULL THEN 'ignored'
        ELSE 'requested' END AS state,
    r.reason, log.at(r.time_ms) AS requested_at, log.at(p.time_ms) AS planned_at, w.published_event_time AS published_at
FROM planned p FULL JOIN log.rollback_requested r ON r.job_id = p.job_id AND r.version = p.adopts
    AND r.after_version < p.version AND r.after_version >= p.earlier_rollback
LEFT JOIN weight_versions w ON w.model_group = p.model_group AND w.version = p.version
LEFT JOIN newest n ON n.job_id = r.job_id
LEFT JOIN log.run_ended e ON e.run_id = r.run_id
ORDER BY coalesce(p.job_id, r.job_id), coalesce(p.version, r.after_version), r.time_ms;

CREATE OR REPLACE VIEW candidates AS
SELECT j.run_id, j.model_group, j.job_id, j.epoch, j.version, j.reward, j.num_groups, j.is_good, j.good_version,
    j.best_reward, b.version AS replaced_by, log.at(j.time_ms) AS judged_at
FROM log.version_judged j LEFT JOIN log.batch_planned b ON NOT j.is_good AND b.job_id = j.job_id
    AND b.adopts = j.good_version AND b.trains_at_version = j.version
ORDER BY j.job_id, j.epoch;

CREATE OR REPLACE VIEW batch_members AS
SELECT m.run_id, m.batch_id, m.position, b.version, m.group_id, m.rollout_id, m.trajectory_id, m.reward, m.staleness,
    m.digest, b.model_group, b.job_id
FROM log.batch_member m
JOIN log.batch_planned b ON b.run_id = m.run_id AND b.batch_id = m.batch_id AND b.log_offset = m.log_offset;

CREATE OR REPLACE VIEW dead_letters AS
SELECT run_id, topic, "partition", "offset", service, stage, error_type, reason, key, size_bytes, headers,
    log.at(time_ms) AS recorded_at, log_partition, log_offset
FROM log.dead_letter
QUALIFY "offset" IS NULL
    -- the offset of a line of an ingested file is its number in that file
    OR row_number() OVER (PARTITION BY topic, "partition", "offset", stage, if(topic = 'ingest', key, NULL),
        if(topic = 'ingest', reason, NULL) ORDER BY log_partition, log_offset) = 1;

-- What no seal has told yet is counted as curation counts it: all closed groups, means of the groups' means, and a group
-- without variance if no agent's rewards differ. Every part has the run, so that a query for one run reads that run alone.
CREATE OR REPLACE VIEW epochs AS
WITH started AS NOT MATERIALIZED (
    SELECT s.run_id, coalesce(j.job_id, s.job_id) AS job_id, s.epoch, s.recorded_ms, s.time_ms, s.log_offset
    FROM log.epoch_started s LEFT JOIN log.task_jobs j ON j.tasks_of = s.job_id
), known AS NOT MATERIALIZED (
    SELECT run_id, job_id, epoch FROM started UNION SELECT run_id, job_id, epoch FROM log.epoch_sealed
), member AS NOT MATERIALIZED (
    SELECT * FROM log.members WHERE purpose = 'train' AND is_viable
)
SELECT run_id, job_id, j.kind, epoch,
    if(e.job_id IS NULL, 'running', 'sealed') AS state, coalesce(e.num_groups, c.num_groups, 0) AS groups,
    coalesce(e.num_trained_groups, t.num_groups, 0) AS trained_groups, coalesce(e.avg_reward, g.avg_reward) AS avg_reward,
    m.reward_std, m.min_reward, m.max_reward, coalesce(e.filtered_avg_reward, t.avg_reward) AS filtered_avg_reward,
    coalesce(e.zero_variance_groups, g.zero_variance_groups, 0) AS zero_variance_groups, e.curriculum_percentile,
    coalesce(m.num_trajectories, 0) AS num_trajectories, coalesce(m.num_tokens, 0) AS num_tokens,
    coalesce(e.num_batches, t.num_batches, 0) AS num_batches, e.is_last, log.at(s.recorded_ms) AS started_at,
    log.at(e.recorded_ms) AS sealed_at, (e.recorded_ms - s.recorded_ms) / 1000 AS seconds,
    log.at(s.time_ms) AS started_event_time, log.at(e.time_ms) AS sealed_event_time
FROM known
LEFT JOIN started s USING (run_id, job_id, epoch)
LEFT JOIN log.epoch_sealed e USING (run_id, job_id, epoch)
LEFT JOIN (SELECT job_id, kind FROM jobs) j USING (job_id)
LEFT JOIN (
    SELECT c.run_id, coalesce(j.job_id, c.job_id) AS job_id, c.epoch, count(*) AS num_groups
    FROM log.group_closed c LEFT JOIN log.task_jobs j ON j.tasks_of = c.job_id
    WHERE c.purpose = 'train' GROUP BY 1, 2, 3
) c USING (run_id, job_id, epoch)
LEFT JOIN (
    SELECT run_id, job_id, epoch, stddev_pop(reward) AS reward_std, min(reward) AS min_reward, max(reward) AS max_reward,
        count(*) AS num_trajectories, log.total(num_tokens) AS num_tokens
    FROM member GROUP BY run_id, job_id, epoch
) m USING (run_id, job_id, epoch)
LEFT JOIN (
    SELECT run_id, job_id, epoch, avg(reward) AS avg_reward, count(*) - count(*) FILTER (differs) AS zero_variance_groups
    FROM (
        SELECT run_id, job_id, epoch, group_id, sum(rewards) / sum(num) AS reward, bool_or(lowest < highest) AS differs
        FROM (
            SELECT run_id, job_id, epoch, group_id, agent, sum(reward) AS rewards, count(*) AS num, min(reward) AS lowest,
                max(reward) AS highest
            FROM member GROUP BY run_id, job_id, epoch, group_id, agent
        ) GROUP BY run_id, job_id, epoch, group_id
    ) GROUP BY run_id, job_id, epoch
) g USING (run_id, job_id, epoch)
LEFT JOIN (
    SELECT run_id, job_id, epoch, count(*) AS num_groups, count(DISTINCT batch_id) AS num_batches, avg(reward) AS avg_reward
    FROM (
        SELECT run_id, b.job_id, b.epoch, m.group_id, any_value(batch_id) AS batch_id, avg(m.reward) AS reward
        FROM batch_members m JOIN log.batch_planned b USING (run_id, batch_id)
        GROUP BY run_id, b.job_id, b.epoch, m.group_id
    ) GROUP BY run_id, job_id, epoch
) t USING (run_id, job_id, epoch)
ORDER BY started_at, s.log_offset, job_id, epoch;

CREATE OR REPLACE VIEW epoch_summary AS
SELECT run_id, job_id, kind, epoch, groups, trained_groups, avg_reward, reward_std, min_reward, max_reward,
    filtered_avg_reward, zero_variance_groups, curriculum_percentile, num_trajectories, num_tokens, num_batches, state,
    started_at, sealed_at, seconds
FROM epochs WHERE kind <> 'sft' ORDER BY min(started_at) OVER (PARTITION BY run_id, job_id), job_id, epoch;

-- By model group: each job has a row with the rewards of its own agents (plans before revision 3 judge without those of no
-- sampled token). Of two validations of an epoch, as after a change of the examples, the one with the newest closed group counts.
CREATE OR REPLACE VIEW validations AS
WITH closed AS (
    SELECT *, regexp_extract(group_id, '^{INDEXED}$', 1, 's') AS asked FROM log.group_closed WHERE purpose = 'validation'
    QUALIFY asked = arg_max(asked, log_offset) OVER (PARTITION BY run_id, job_id, epoch)
)
SELECT run_id, job_id, epoch, max(max_version) FILTER (num_completion_tokens > 0) AS version,
    count(DISTINCT group_id) AS groups,
    count(trajectory_id) AS num_trajectories, avg(group_reward) FILTER (is_first) AS avg_reward,
    stddev_pop(reward) AS reward_std, log.at(max(recorded_ms)) AS ended_at, log.at(max(time_ms)) AS ended_event_time
FROM (
    SELECT c.run_id, coalesce(j.job_id, c.job_id) AS job_id, c.epoch, c.group_id, c.recorded_ms, c.time_ms, m.trajectory_id,
        m.num_completion_tokens, m.max_version, m.reward, avg(m.reward) OVER w AS group_reward, row_number() OVER w = 1 AS is_first
    FROM closed c LEFT JOIN log.task_jobs j ON j.tasks_of = c.job_id
    LEFT JOIN log.members m
        ON m.run_id = c.run_id AND m.group_id = c.group_id AND m.job_id = coalesce(j.job_id, c.job_id)
    WINDOW w AS (PARTITION BY c.run_id, c.group_id, coalesce(j.job_id, c.job_id))
)
GROUP BY run_id, job_id, epoch ORDER BY ended_at, job_id, epoch;

CREATE OR REPLACE VIEW log.judged AS
WITH attempt AS (
    SELECT *, true AS is_closed FROM log.attempt WHERE is_known AND settled IS NOT NULL
    UNION ALL
    SELECT a.*, c.group_id IS NOT NULL FROM log.attempt a LEFT JOIN log.group_closed c ON c.group_id = a.group_id
    WHERE a.is_known AND a.settled IS NULL
), judged AS (
    SELECT a.run_id, a.group_id, a.rollout_id, a.is_trained, if(a.is_rejected, a.rejected_tokens, 0) AS tokens_rejected,
        CASE
            WHEN a.is_trained THEN 'trained'
            -- if not, another agent's trajectory of it still waits for its training
            WHEN a.is_rejected AND NOT coalesce(a.member_tokens > a.rejected_tokens, false) THEN 'rejected'
            -- its end came after the closing that counted it out, or a part of it after the end that lacked it
            WHEN a.settled = 'failed' AND a.state = 'ended' THEN 'late'
            WHEN a.settled = 'rejected' AND a.settled_cause = 'incomplete' AND a.state = 'ended'
                AND a.last_offset > a.end_offset THEN 'late'
            WHEN a.settled IN ('failed', 'superseded', 'rejected') THEN a.settled
            WHEN a.state = 'failed' THEN 'failed'
            WHEN a.is_planned OR a.settled = 'complete' OR a.member_tokens IS NOT NULL THEN
                if(e.run_id IS NULL, if(a.is_planned, 'planned', 'waiting'), 'run_ended')
            WHEN a.is_closed THEN if(a.state = 'ended', 'late', 'dead_late')
            WHEN e.run_id IS NOT NULL THEN if(a.state = 'ended', 'run_ended', 'dead_run_ended')
            ELSE if(a.state = 'ended', 'assembling', 'running')
        END AS judgement,
        CASE
            WHEN judgement IN ('late', 'run_ended') THEN 'rejected'
            WHEN judgement IN ('dead_late', 'dead_run_ended') THEN 'dead'
            WHEN judgement IN ('planned', 'waiting', 'assembling', 'running') THEN 'open'
            ELSE judgement
        END AS outcome,
        CASE judgement
            WHEN 'trained' THEN NULL
            WHEN 'dead_late' THEN 'late'
            WHEN 'dead_run_ended' THEN 'run_ended'
            WHEN 'failed' THEN coalesce(if(a.settled = 'failed', a.settled_cause, NULL), a.cause)
            WHEN 'superseded' THEN coalesce(a.settled_cause, a.cause)
            WHEN 'rejected' THEN if(a.is_rejected, a.rejected_cause, coalesce(a.settled_cause, a.cause))
            ELSE judgement
        END AS why,
        coalesce(
            if(why = 'late', a.step_tokens, NULL),
            -- a step that was in progress when its group closed came after the closing that counted the tokens
            if(judgement IN ('failed', 'superseded'), greatest(a.settled_tokens, a.step_tokens), nullif(a.settled_tokens, 0)),
            a.member_tokens, a.rejected_tokens, a.step_tokens, 0
        ) AS tokens
    FROM attempt a LEFT JOIN log.run_ended e ON e.run_id = a.run_id
)
SELECT run_id, rollout_id, outcome, why AS cause, tokens, group_id, is_trained, tokens_rejected FROM judged;

CREATE OR REPLACE VIEW outcomes AS SELECT run_id, rollout_id, outcome, cause, tokens, group_id FROM log.judged;

CREATE OR REPLACE VIEW late_records AS
SELECT l.run_id, l.group_id, l.rollout_id, l.kind, l.index, c.reason AS group_closed, log.at(l.time_ms) AS recorded_at,
    l.log_partition, l.log_offset
FROM (
    SELECT run_id, group_id, rollout_id, 'step' AS kind, step_index AS index, time_ms, log_partition, log_offset
    FROM log.step_recorded
    UNION ALL SELECT run_id, group_id, rollout_id, 'reward', reward_index, time_ms, log_partition, log_offset
    FROM log.reward_recorded
    UNION ALL SELECT run_id, group_id, rollout_id, state, NULL, time_ms, log_partition, log_offset
    FROM log.rollout_finished
) l JOIN log.group_closed c ON c.group_id = l.group_id AND l.log_offset > c.last_step_offset
ORDER BY l.log_partition, l.log_offset;

-- How the prompts of a rollout's calls go on from earlier ones of the same agent: bridged (all of a call, ids and all),
-- spliced (a part of its answer), forked (of its prompt at most, so that its answer was rendered anew or discarded).
CREATE OR REPLACE VIEW prompts AS
SELECT s.run_id, s.group_id, s.rollout_id, s.agent, s.step_index, s.prefix_step,
    CASE
        WHEN s.num_prompt_tokens::HUGEINT - s.num_new_prompt_tokens = p.num_prompt_tokens::HUGEINT + p.num_completion_tokens
            THEN 'bridged'
        WHEN s.num_prompt_tokens::HUGEINT - s.num_new_prompt_tokens > p.num_prompt_tokens THEN 'spliced'
        WHEN s.step_index = min(s.step_index) OVER (PARTITION BY s.rollout_id, s.agent) THEN 'first'
        ELSE 'forked'
    END AS kind,
    s.num_prompt_tokens, s.num_new_prompt_tokens, s.num_completion_tokens
FROM log.step_recorded s
LEFT JOIN log.step_recorded p ON p.rollout_id = s.rollout_id AND p.step_index = s.prefix_step
WHERE s.num_completion_tokens IS NOT NULL;

-- What was not trained: each rejected trajectory by its own cause (another agent's of the same attempt may be trained), whole
-- attempts otherwise, and of trained trajectories the calls whose log-probabilities are not known and those that were
-- discarded.
CREATE OR REPLACE VIEW wasted_tokens AS
SELECT run_id, cause, outcome, count(DISTINCT rollout_id) AS num_rollouts, log.total(tokens) AS num_tokens FROM (
    SELECT run_id, coalesce(cause, outcome) AS cause, outcome, rollout_id, tokens::HUGEINT - tokens_rejected AS tokens
    FROM log.judged WHERE NOT is_trained AND outcome <> 'open' AND (tokens_rejected = 0 OR tokens > tokens_rejected)
    UNION ALL
    SELECT a.run_id, r.cause, if(a.is_trained, 'trained', 'rejected'), r.rollout_id, r.num_tokens
    FROM log.trajectory_rejected r JOIN log.attempt a ON a.rollout_id = r.rollout_id AND a.run_id = r.run_id
    WHERE a.is_known AND r.num_tokens > 0
    UNION ALL
    SELECT m.run_id, 'no_logprobs', 'trained', m.rollout_id, m.num_without_logprobs
    FROM log.members m ANTI JOIN log.trajectory_rejected r ON r.trajectory_id = m.trajectory_id AND r.run_id = m.run_id
    JOIN log.attempt a ON a.rollout_id = m.rollout_id JOIN jobs j ON j.job_id = m.job_id
    WHERE m.num_without_logprobs > 0 AND m.policy = 'model' AND a.is_trained AND j.kind = 'rl'
    UNION ALL
    SELECT m.run_id, 'dead_branch', 'trained', m.rollout_id, m.num_dead_tokens
    FROM log.members m ANTI JOIN log.trajectory_rejected r ON r.trajectory_id = m.trajectory_id AND r.run_id = m.run_id
    JOIN log.attempt a ON a.rollout_id = m.rollout_id
    WHERE m.num_dead_tokens > 0 AND a.is_trained
) WHERE cause <> 'handed_over' GROUP BY run_id, cause, outcome ORDER BY run_id, num_tokens DESC, cause, outcome;

-- Of the batches that were trained, and of two jobs' batches of one version of the one that it was trained with.
CREATE OR REPLACE VIEW staleness AS
SELECT m.run_id, t.version, min(m.staleness) AS min_staleness, avg(m.staleness) AS mean_staleness,
    max(m.staleness) AS max_staleness, count(*) AS num_trajectories, t.model_group
FROM batch_members m JOIN training_steps t ON t.batch_id = m.batch_id
GROUP BY m.run_id, t.model_group, t.version ORDER BY m.run_id, t.model_group, t.version;

-- How many trained tokens of a version's batch were how many versions old: one row for each class of ages that has some.
CREATE OR REPLACE VIEW token_staleness AS
WITH counted AS (
    SELECT run_id, job_id, model_group, version, a.first_age, a.last_age, metrics['staleness/tokens_' || a.name] AS num
    FROM training_steps, (VALUES (0, 0, '0'), (1, 1, '1'), (2, 2, '2'), (3, 4, '3_4'), (5, 8, '5_8'), (9, 16, '9_16'),
        (17, NULL, '17_up')) AS a (first_age, last_age, name)
)
SELECT run_id, job_id, model_group, version, first_age AS min_versions_old, last_age AS max_versions_old,
    least(num, 9.2e18)::BIGINT AS num_tokens, num / sum(num) OVER (PARTITION BY model_group, version) AS share
FROM counted WHERE num > 0 ORDER BY model_group, version, min_versions_old;

CREATE OR REPLACE VIEW example_difficulty AS
SELECT run_id, example_id, avg(reward) AS mean_reward, stddev_pop(reward) AS reward_std,
    count(DISTINCT rollout_id) AS num_rollouts, count(DISTINCT group_id) AS groups
FROM log.members WHERE policy = 'model' AND purpose = 'train'
GROUP BY run_id, example_id ORDER BY run_id, mean_reward, example_id;

-- Matches of a league, each pair of seats both ways: result is 1 for a win of player, 0.5 for a draw, 0 for a loss.
CREATE OR REPLACE VIEW matches AS
SELECT c.run_id, c.group_id, a.member, c.job_id, c.epoch, c.purpose, c.example_id, a.seat, a.player,
    b.seat AS opponent_seat, b.player AS opponent, a.score, b.score AS opponent_score,
    CASE WHEN a.score > b.score THEN 1.0 WHEN a.score < b.score THEN 0.0 ELSE 0.5 END::DOUBLE AS result,
    log.at(c.time_ms) AS closed_at
FROM log.match_seat a
JOIN log.match_seat b ON b.group_id = a.group_id AND b.member = a.member AND b.log_offset = a.log_offset AND b.seat <> a.seat
JOIN log.group_closed c ON c.group_id = a.group_id AND c.log_offset = a.log_offset;

CREATE OR REPLACE VIEW payoff_matrix AS
SELECT run_id, player, opponent, count(*) AS num_matches, count(*) FILTER (result = 1) AS num_wins,
    count(*) FILTER (result = 0.5) AS num_draws, count(*) FILTER (result = 0) AS num_losses, avg(result) AS mean_score
FROM matches GROUP BY run_id, player, opponent ORDER BY run_id, player, opponent;

CREATE OR REPLACE VIEW seat_results AS
SELECT run_id, purpose, player, seat, opponent, count(*) AS num_matches, count(*) FILTER (result = 1) AS num_wins,
    count(*) FILTER (result = 0.5) AS num_draws, count(*) FILTER (result = 0) AS num_losses, avg(result) AS mean_score
FROM matches GROUP BY run_id, purpose, player, seat, opponent ORDER BY run_id, purpose, player, seat, opponent;

-- Elo (A. Elo, The Rating of Chessplayers, Past and Present, 1978): a player with rating a scores E = 1 / (1 + 10^((b - a) / 400))
-- against one with b; after a score S (1, 0.5 or 0) its rating is a + 32 (S - E). It begins at 1200, a version at the rating of
-- the highest version below it that has played. Matches are in the order of their tasks; whoever plays itself is not rated.
CREATE OR REPLACE MACRO log.elo_rating(ratings, place, parent) AS coalesce(ratings[place], ratings[parent], 1200.0);
CREATE OR REPLACE MACRO log.elo_after(ratings, place, parent, other, others_parent, score) AS
    log.elo_rating(ratings, place, parent) + 32.0 * (score - 1.0 / (1.0 + pow(10.0,
        (log.elo_rating(ratings, other, others_parent) - log.elo_rating(ratings, place, parent)) / 400.0)));

CREATE OR REPLACE VIEW league_ratings AS
WITH match AS (
    SELECT run_id, player AS a, opponent AS b, result AS score, row_number() OVER (
        PARTITION BY run_id ORDER BY epoch, purpose <> 'validation', group_id, member, seat, opponent_seat
    ) AS number
    FROM matches WHERE seat < opponent_seat AND player <> opponent
), seen AS (
    SELECT run_id, player, min(number) AS first, count(*) AS num_matches, regexp_extract(player, '^{PLAYER}$', 1) AS model_group,
        try_cast(if(starts_with(player, 'scripted:'), '', regexp_extract(player, '^{PLAYER}$', 2)) AS BIGINT) AS version
    FROM (SELECT run_id, a AS player, number FROM match UNION ALL SELECT run_id, b, number FROM match) GROUP BY run_id, player
), numbered AS (
    SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY first, player) AS place, count(*) OVER (PARTITION BY run_id) AS num_players FROM seen
), placed AS (
    SELECT s.run_id, s.player, s.place, s.num_players, coalesce(arg_max(p.place, p.version), 0) AS parent
    FROM numbered s LEFT JOIN numbered p
        ON p.run_id = s.run_id AND p.model_group = s.model_group AND p.version < s.version AND p.first < s.first
    GROUP BY ALL
), ordered AS (
    SELECT m.run_id, any_value(a.num_players) AS num_players, list({
        'ratings': []::DOUBLE[], 'a': a.place, 'b': b.place, 'from_a': a.parent, 'from_b': b.parent, 'score': m.score
    } ORDER BY m.number) AS matches
    FROM match m JOIN placed a ON a.run_id = m.run_id AND a.player = m.a JOIN placed b ON b.run_id = m.run_id AND b.player = m.b
    GROUP BY m.run_id
), rated AS (
    SELECT run_id, list_reduce(matches, lambda x, y: {
        'ratings': CASE WHEN y.a < y.b THEN
            x.ratings[:y.a - 1] || [log.elo_after(x.ratings, y.a, y.from_a, y.b, y.from_b, y.score)] || x.ratings[y.a + 1:y.b - 1]
                || [log.elo_after(x.ratings, y.b, y.from_b, y.a, y.from_a, 1 - y.score)] || x.ratings[y.b + 1:]
        ELSE
            x.ratings[:y.b - 1] || [log.elo_after(x.ratings, y.b, y.from_b, y.a, y.from_a, 1 - y.score)] || x.ratings[y.b + 1:y.a - 1]
                || [log.elo_after(x.ratings, y.a, y.from_a, y.b, y.from_b, y.score)] || x.ratings[y.a + 1:]
        END, 'a': y.a, 'b': y.b, 'from_a': y.from_a, 'from_b': y.from_b, 'score': y.score
    }, {
        'ratings': list_resize([]::DOUBLE[], num_players), 'a': 0::BIGINT, 'b': 0::BIGINT, 'from_a': 0::BIGINT, 'from_b': 0::BIGINT,
        'score': 0.0::DOUBLE
    }).ratings AS ratings
    FROM ordered
)
SELECT r.run_id, s.player, s.model_group, s.version, r.ratings[s.place] AS rating, s.num_matches
FROM rated r JOIN numbered s ON s.run_id = r.run_id
ORDER BY r.run_id, rating DESC, s.player;

-- A row of each step for every batch that has its trajectory, of the batch's run: a what-if trains its parent's rollouts. A
-- step that no batch of its own run has is a row of its own run too, without a batch.
CREATE OR REPLACE VIEW lineage AS
WITH step AS NOT MATERIALIZED (
    SELECT s.run_id, s.rollout_id, s.step_index, s.agent, s.event_type, s.min_version AS sampled_version, j.trajectory_id,
        j.run_id AS made_by, s.group_id
    FROM log.step_recorded s
    LEFT JOIN log.trajectory_assembled j ON j.rollout_id = s.rollout_id AND j.agent = s.agent
), used AS NOT MATERIALIZED (
    SELECT s.*, b.batch_id, b.staleness, b.job_id, b.model_group
    FROM step s LEFT JOIN batch_members b ON b.trajectory_id = s.trajectory_id AND b.run_id = s.run_id
    UNION ALL
    SELECT s.* REPLACE (b.run_id AS run_id), b.batch_id, b.staleness, b.job_id, b.model_group
    FROM step s JOIN batch_members b ON b.trajectory_id = s.trajectory_id AND b.run_id <> s.made_by
)
SELECT u.run_id, u.rollout_id, u.step_index, u.agent, u.event_type, u.sampled_version, u.trajectory_id, u.group_id,
    u.batch_id, u.staleness, t.version AS training_step, w.version, w.weights_sha256, u.job_id, u.model_group
FROM used u
LEFT JOIN training_steps t ON t.batch_id = u.batch_id
LEFT JOIN weight_versions w ON w.model_group = t.model_group AND w.version = t.version;
