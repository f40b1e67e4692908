-- The metrics file: one table for each kind of event in schema `log` (rows are only ever added; the first occurrence
-- of an id wins by primary key), and public tables and views derived from them. What follows the line "-- views" is
-- made anew when it has changed; a change before it makes the projector read the log from its start again.
-- Every log table says where its event lies (log_partition, log_offset) and its event time (time_ms, UTC).

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
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.run_ended (
    run_id VARCHAR PRIMARY KEY, cause VARCHAR, message VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.job_started (
    job_id VARCHAR PRIMARY KEY, run_id VARCHAR, model_group VARCHAR, base_version BIGINT, num_epochs BIGINT,
    plan JSON, rollout JSON, policy VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.epoch_started (
    job_id VARCHAR, epoch BIGINT, run_id VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, epoch)
);
CREATE TABLE log.submission_received (
    submission_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, epoch BIGINT, num_groups BIGINT,
    num_trajectories BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.group_closed (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, example_id VARCHAR, epoch BIGINT, task_index BIGINT,
    purpose VARCHAR, policy VARCHAR, reason VARCHAR, void_cause VARCHAR, is_viable BOOLEAN, size BIGINT,
    num_members BIGINT, mean_reward DOUBLE, last_step_offset BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.group_member (
    trajectory_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, rollout_id VARCHAR, agent VARCHAR,
    member BIGINT, digest VARCHAR, reward DOUBLE, num_tokens BIGINT, num_completion_tokens BIGINT, min_version BIGINT,
    max_version BIGINT, num_without_logprobs BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.attempt_settled (
    rollout_id VARCHAR PRIMARY KEY, run_id VARCHAR, group_id VARCHAR, member BIGINT, attempt BIGINT, outcome VARCHAR,
    cause VARCHAR, num_tokens BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);

-- tasks, steps, trajectories

CREATE TABLE log.task_requested (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, example_id VARCHAR, epoch BIGINT, task_index BIGINT,
    purpose VARCHAR, num_rollouts BIGINT, minimum BIGINT, seed BIGINT, min_version BIGINT, environment VARCHAR,
    policy VARCHAR, inputs VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.task_cancelled (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, cause VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.group_started (
    group_id VARCHAR PRIMARY KEY, run_id VARCHAR, job_id VARCHAR, example_id VARCHAR, epoch BIGINT, task_index BIGINT,
    purpose VARCHAR, policy VARCHAR, size BIGINT, minimum BIGINT, timeout_ms BIGINT, void_cause VARCHAR, owner VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
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
    name VARCHAR, parent_id VARCHAR, framework VARCHAR, input VARCHAR, output VARCHAR, usage JSON,
    num_prompt_tokens BIGINT, num_new_prompt_tokens BIGINT, num_completion_tokens BIGINT, model_group VARCHAR,
    min_version BIGINT, max_version BIGINT, finish_reason VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (rollout_id, step_index)
);
CREATE TABLE log.reward_recorded (
    rollout_id VARCHAR, reward_index BIGINT, run_id VARCHAR, group_id VARCHAR, name VARCHAR, value DOUBLE,
    step_index BIGINT, agent VARCHAR,
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
    seed BIGINT, curriculum_sha256 VARCHAR, previous_sha256 VARCHAR, digest VARCHAR,
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
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, epoch)
);

-- jobs, weights, dlq

CREATE TABLE log.job_submitted (
    job_id VARCHAR PRIMARY KEY, run_id VARCHAR, model_group VARCHAR, kind VARCHAR, algorithm VARCHAR, model VARCHAR,
    base_version BIGINT, num_versions BIGINT, settings JSON,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT
);
CREATE TABLE log.job_progressed (
    job_id VARCHAR, version BIGINT, run_id VARCHAR, percent DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, version)
);
CREATE TABLE log.job_finished (
    job_id VARCHAR, state VARCHAR, run_id VARCHAR, final_version BIGINT, error VARCHAR,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (job_id, state)
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
    PRIMARY KEY (model_group, version, term)
);
CREATE TABLE log.weights_published (
    model_group VARCHAR, version BIGINT, term BIGINT, run_id VARCHAR, job_id VARCHAR, batch_id VARCHAR, parent BIGINT,
    weights_sha256 VARCHAR, weights_format VARCHAR, base_model VARCHAR, uri VARCHAR, size_bytes BIGINT,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, term)
);
CREATE TABLE log.weights_loaded (
    model_group VARCHAR, version BIGINT, engine VARCHAR, run_id VARCHAR, num_skipped BIGINT, seconds DOUBLE,
    time_ms BIGINT, log_partition BIGINT, log_offset BIGINT,
    PRIMARY KEY (model_group, version, engine)
);
CREATE TABLE log.dead_letter (
    log_partition BIGINT, log_offset BIGINT, run_id VARCHAR, topic VARCHAR, "partition" BIGINT, "offset" BIGINT,
    service VARCHAR, stage VARCHAR, error_type VARCHAR, reason VARCHAR, key VARCHAR, size_bytes BIGINT, headers JSON,
    time_ms BIGINT,
    PRIMARY KEY (log_partition, log_offset)
);

-- views

CREATE OR REPLACE MACRO log.at(ms) AS make_timestamp(least(ms, 253402300799000) * 1000);

CREATE OR REPLACE VIEW runs AS
SELECT s.run_id, s.name, coalesce(e.cause, 'running') AS state, e.message, log.at(s.time_ms) AS started_at,
    log.at(e.time_ms) AS ended_at, (e.time_ms - s.time_ms) / 1000 AS seconds, s.seed, s.num_examples, s.num_partitions,
    s.parent_run_id, s.parent_version, s.dataset_uri, s.dataset_sha256, s.config, s.library_versions
FROM log.run_started s LEFT JOIN log.run_ended e USING (run_id)
ORDER BY s.time_ms, s.run_id;

CREATE OR REPLACE VIEW jobs AS
SELECT coalesce(s.run_id, b.run_id) AS run_id, job_id, coalesce(s.kind, if(b.policy = 'demonstration', 'sft', 'rl')) AS kind,
    CASE WHEN f.state IS NOT NULL THEN f.state WHEN p.version IS NOT NULL OR b.job_id IS NOT NULL THEN 'running'
        ELSE 'submitted' END AS state,
    if(f.state = 'succeeded', 100.0, coalesce(p.percent, 0.0)) AS percent, coalesce(f.final_version, p.version) AS version,
    coalesce(s.model_group, b.model_group) AS model_group, coalesce(b.base_version, s.base_version) AS base_version,
    b.num_epochs, s.num_versions, s.algorithm, s.model, f.error, log.at(coalesce(s.time_ms, b.time_ms)) AS started_at,
    log.at(f.time_ms) AS ended_at, s.settings, b.plan, b.rollout
FROM log.job_submitted s FULL JOIN log.job_started b USING (job_id)
LEFT JOIN (SELECT job_id, max(version) AS version, max(percent) AS percent FROM log.job_progressed GROUP BY job_id) p
    USING (job_id)
LEFT JOIN (SELECT * FROM log.job_finished QUALIFY row_number() OVER (PARTITION BY job_id ORDER BY log_offset DESC) = 1) f
    USING (job_id)
ORDER BY coalesce(s.time_ms, b.time_ms), job_id;

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
    log.at(c.time_ms) AS closed_at, s.owner
FROM log.group_closed c FULL JOIN log.group_started s USING (group_id)
LEFT JOIN (
    SELECT group_id, log_offset, stddev_pop(reward) AS reward_std, sum(num_tokens)::BIGINT AS num_tokens,
        min(min_version) AS min_version, max(max_version) AS max_version
    FROM log.group_member GROUP BY group_id, log_offset
) m ON m.group_id = c.group_id AND m.log_offset = c.log_offset;

CREATE OR REPLACE VIEW log.members AS
SELECT m.*, c.job_id, c.example_id, c.epoch, c.task_index, c.purpose, c.policy, c.is_viable
FROM log.group_member m JOIN log.group_closed c ON m.group_id = c.group_id AND m.log_offset = c.log_offset;

CREATE OR REPLACE VIEW rollouts AS
SELECT coalesce(s.run_id, f.run_id) AS run_id, rollout_id, coalesce(s.group_id, f.group_id) AS group_id, g.job_id,
    g.example_id, g.epoch, g.purpose, g.policy, s.member, s.attempt, coalesce(f.state, 'running') AS state, m.reward,
    f.num_steps, f.num_rewards, f.stop_reason, f.cause, f.message, f.is_final, s.seed,
    log.at(s.time_ms) AS started_at, log.at(f.time_ms) AS ended_at, (f.time_ms - s.time_ms) / 1000 AS seconds
FROM log.rollout_started s FULL JOIN log.rollout_finished f USING (rollout_id)
LEFT JOIN groups g ON g.group_id = coalesce(s.group_id, f.group_id)
LEFT JOIN (SELECT rollout_id, avg(reward) AS reward FROM log.members GROUP BY rollout_id) m USING (rollout_id);

CREATE OR REPLACE VIEW steps AS
SELECT run_id, group_id, rollout_id, step_index, agent, event_type, name, input, output, usage, num_prompt_tokens,
    num_new_prompt_tokens, num_completion_tokens, model_group, min_version, max_version, finish_reason, parent_id,
    framework, log.at(time_ms) AS recorded_at, log_partition, log_offset
FROM log.step_recorded;

CREATE OR REPLACE VIEW rewards AS
SELECT run_id, group_id, rollout_id, reward_index, name, value, step_index, agent, log.at(time_ms) AS recorded_at,
    log_partition, log_offset
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
    w.base_model, w.uri, w.size_bytes, w.term, log.at(w.time_ms) AS published_at
FROM log.weights_published w
WHERE NOT EXISTS (SELECT 1 FROM log.learner_claimed c
    WHERE c.model_group = w.model_group AND c.term > w.term AND c.log_offset < w.log_offset)
QUALIFY row_number() OVER (PARTITION BY w.model_group, w.version ORDER BY w.log_offset) = 1
ORDER BY w.model_group, w.version;

CREATE OR REPLACE VIEW training_steps AS
SELECT t.run_id, t.job_id, t.epoch, t.version, t.batch_id, t.model_group, t.metrics['loss/total'] AS loss, t.metrics,
    t.num_optimizer_steps, t.tokens_per_s, t.seconds, t.weights_sha256, t.term, log.at(t.time_ms) AS trained_at,
    t.metrics['dpo/accuracy'] AS preference_accuracy, t.metrics['dpo/margin'] AS preference_margin
FROM log.step_trained t
WHERE NOT EXISTS (SELECT 1 FROM log.learner_claimed c
    WHERE c.model_group = t.model_group AND c.term > t.term AND c.log_offset < t.log_offset)
QUALIFY row_number() OVER (PARTITION BY t.model_group, t.version ORDER BY t.log_offset) = 1
ORDER BY t.model_group, t.version;

CREATE OR REPLACE VIEW weight_loads AS
SELECT run_id, model_group, version, engine, seconds, num_skipped, log.at(time_ms) AS loaded_at
FROM log.weights_loaded ORDER BY log_offset;

CREATE OR REPLACE VIEW batches AS
SELECT b.run_id, b.batch_id, b.job_id, b.epoch, b.batch_index, b.trains_at_version, b.version, b.num_trajectories,
    b.num_groups, t.batch_id IS NOT NULL AS is_trained, b.model_group, b.seed, b.curriculum_sha256, b.previous_sha256,
    b.digest, log.at(b.time_ms) AS planned_at, t.trained_at
FROM log.batch_planned b LEFT JOIN (SELECT batch_id, any_value(trained_at) AS trained_at FROM training_steps GROUP BY batch_id) t
    USING (batch_id)
ORDER BY b.log_offset;

CREATE OR REPLACE VIEW batch_members AS
SELECT m.run_id, m.batch_id, m.position, b.version, m.group_id, m.rollout_id, m.trajectory_id, m.reward, m.staleness,
    m.digest
FROM log.batch_member m JOIN log.batch_planned b ON b.batch_id = m.batch_id AND b.log_offset = m.log_offset;

CREATE OR REPLACE VIEW dead_letters AS
SELECT run_id, topic, "partition", "offset", service, stage, error_type, reason, key, size_bytes, headers,
    log.at(time_ms) AS recorded_at, log_partition, log_offset
FROM log.dead_letter
QUALIFY "offset" IS NULL
    OR row_number() OVER (PARTITION BY topic, "partition", "offset", stage ORDER BY log_partition, log_offset) = 1;

CREATE OR REPLACE VIEW epochs AS
SELECT coalesce(s.run_id, e.run_id) AS run_id, job_id, j.kind, epoch,
    if(e.job_id IS NULL, 'running', 'sealed') AS state, coalesce(e.num_groups, m.num_groups, 0) AS groups,
    coalesce(e.num_trained_groups, t.num_groups, 0) AS trained_groups, coalesce(e.avg_reward, m.avg_reward) AS avg_reward,
    m.reward_std, m.min_reward, m.max_reward, coalesce(e.filtered_avg_reward, t.avg_reward) AS filtered_avg_reward,
    coalesce(e.zero_variance_groups, m.zero_variance_groups, 0) AS zero_variance_groups, e.curriculum_percentile,
    coalesce(m.num_trajectories, 0) AS num_trajectories, coalesce(m.num_tokens, 0) AS num_tokens,
    coalesce(e.num_batches, t.num_batches, 0) AS num_batches, e.is_last, log.at(s.time_ms) AS started_at,
    log.at(e.time_ms) AS sealed_at, (e.time_ms - s.time_ms) / 1000 AS seconds
FROM log.epoch_started s FULL JOIN log.epoch_sealed e USING (job_id, epoch)
LEFT JOIN (SELECT job_id, kind FROM jobs) j USING (job_id)
LEFT JOIN (
    SELECT job_id, epoch, count(DISTINCT group_id) AS num_groups, stddev_pop(reward) AS reward_std,
        min(reward) AS min_reward, max(reward) AS max_reward, count(*) AS num_trajectories,
        sum(num_tokens)::BIGINT AS num_tokens, avg(group_reward) AS avg_reward,
        count(DISTINCT group_id) FILTER (group_min = group_max) AS zero_variance_groups
    FROM (
        SELECT *, avg(reward) OVER w AS group_reward, min(reward) OVER w AS group_min, max(reward) OVER w AS group_max
        FROM log.members WHERE purpose = 'train' AND is_viable WINDOW w AS (PARTITION BY group_id)
    )
    GROUP BY job_id, epoch
) m USING (job_id, epoch)
LEFT JOIN (
    SELECT b.job_id, b.epoch, count(DISTINCT m.group_id) AS num_groups, count(DISTINCT batch_id) AS num_batches,
        avg(m.reward) AS avg_reward
    FROM batch_members m JOIN log.batch_planned b USING (batch_id) GROUP BY b.job_id, b.epoch
) t USING (job_id, epoch)
ORDER BY started_at, job_id, epoch;

CREATE OR REPLACE VIEW epoch_summary AS
SELECT run_id, job_id, kind, epoch, groups, trained_groups, avg_reward, reward_std, min_reward, max_reward,
    filtered_avg_reward, zero_variance_groups, curriculum_percentile, num_trajectories, num_tokens, num_batches, state,
    started_at, sealed_at, seconds
FROM epochs WHERE kind <> 'sft' ORDER BY min(started_at) OVER (PARTITION BY job_id), job_id, epoch;

CREATE OR REPLACE VIEW validations AS
SELECT c.run_id, c.job_id, c.epoch, max(m.max_version) AS version, count(DISTINCT c.group_id) AS groups,
    count(m.trajectory_id) AS num_trajectories, avg(m.reward) AS avg_reward, stddev_pop(m.reward) AS reward_std,
    log.at(max(c.time_ms)) AS ended_at
FROM log.group_closed c LEFT JOIN log.members m ON m.group_id = c.group_id
WHERE c.purpose = 'validation' GROUP BY c.run_id, c.job_id, c.epoch ORDER BY ended_at, c.job_id, c.epoch;

CREATE OR REPLACE VIEW outcomes AS
WITH settled AS (
    SELECT a.rollout_id, a.outcome, nullif(a.cause, '') AS cause, a.num_tokens
    FROM log.attempt_settled a JOIN log.group_closed c ON c.group_id = a.group_id AND c.log_offset = a.log_offset
), member AS (
    SELECT rollout_id, sum(num_tokens)::BIGINT AS num_tokens FROM log.members GROUP BY rollout_id
), planned AS ( -- by run, because a what-if's batches decide nothing of its parent's rollouts
    SELECT m.run_id, m.rollout_id, bool_or(b.is_trained) AS is_trained
    FROM batch_members m JOIN batches b USING (batch_id) GROUP BY m.run_id, m.rollout_id
), rejected AS (
    SELECT rollout_id, min(cause) AS cause, sum(num_tokens)::BIGINT AS num_tokens
    FROM log.trajectory_rejected GROUP BY rollout_id
), stepped AS (
    SELECT rollout_id, min(run_id) AS run_id, min(group_id) AS group_id, max(log_offset) AS last_offset,
        sum(num_new_prompt_tokens + num_completion_tokens)::BIGINT AS num_tokens
    FROM log.step_recorded GROUP BY rollout_id
), rewarded AS (
    SELECT rollout_id, min(run_id) AS run_id, min(group_id) AS group_id, max(log_offset) AS last_offset
    FROM log.reward_recorded GROUP BY rollout_id
), attempt AS (
    SELECT rollout_id, min(run_id) AS run_id, min(group_id) AS group_id FROM (
        SELECT run_id, group_id, rollout_id FROM log.rollout_started
        UNION ALL SELECT run_id, group_id, rollout_id FROM log.rollout_finished
        UNION ALL SELECT run_id, group_id, rollout_id FROM log.attempt_settled
        UNION ALL SELECT run_id, group_id, rollout_id FROM log.members
        UNION ALL SELECT run_id, group_id, rollout_id FROM stepped
        UNION ALL SELECT run_id, group_id, rollout_id FROM rewarded
    ) GROUP BY rollout_id
), judged AS (
    SELECT a.run_id, a.group_id, a.rollout_id,
        CASE
            WHEN p.is_trained THEN ['trained', NULL]
            WHEN r.rollout_id IS NOT NULL THEN ['rejected', r.cause]
            -- its end came after the closing that counted it out, or a part of it after the end that lacked it
            WHEN s.outcome = 'failed' AND f.state = 'ended' THEN ['rejected', 'late']
            WHEN s.outcome = 'rejected' AND s.cause = 'incomplete' AND f.state = 'ended'
                AND greatest(t.last_offset, w.last_offset) > f.log_offset THEN ['rejected', 'late']
            WHEN s.outcome IN ('failed', 'superseded', 'rejected') THEN [s.outcome, coalesce(s.cause, f.cause)]
            WHEN f.state = 'failed' THEN ['failed', f.cause]
            WHEN p.rollout_id IS NOT NULL OR s.outcome = 'complete' OR m.rollout_id IS NOT NULL THEN
                if(e.run_id IS NULL, ['open', if(p.rollout_id IS NULL, 'waiting', 'planned')], ['rejected', 'run_ended'])
            WHEN c.group_id IS NOT NULL THEN if(f.state = 'ended', ['rejected', 'late'], ['dead', 'late'])
            WHEN e.run_id IS NOT NULL THEN if(f.state = 'ended', ['rejected', 'run_ended'], ['dead', 'run_ended'])
            ELSE ['open', if(f.state = 'ended', 'assembling', 'running')]
        END AS judgement,
        coalesce(if(judgement[2] = 'late', t.num_tokens, NULL), nullif(s.num_tokens, 0), m.num_tokens, r.num_tokens, t.num_tokens, 0) AS tokens
    FROM attempt a
    LEFT JOIN settled s USING (rollout_id) LEFT JOIN member m USING (rollout_id)
    LEFT JOIN rejected r USING (rollout_id) LEFT JOIN stepped t USING (rollout_id)
    LEFT JOIN rewarded w USING (rollout_id) LEFT JOIN log.rollout_finished f USING (rollout_id) LEFT JOIN log.group_closed c ON c.group_id = a.group_id
    LEFT JOIN log.run_ended e ON e.run_id = a.run_id
    LEFT JOIN planned p ON p.run_id = a.run_id AND p.rollout_id = a.rollout_id
)
SELECT run_id, rollout_id, judgement[1] AS outcome, judgement[2] AS cause, tokens, group_id FROM judged;

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

-- What was not trained: whole attempts, and of trained ones the calls whose log-probabilities are not known.
CREATE OR REPLACE VIEW wasted_tokens AS
SELECT * FROM (
    SELECT run_id, coalesce(cause, outcome) AS cause, outcome, count(*) AS num_rollouts, sum(tokens)::BIGINT AS num_tokens
    FROM outcomes WHERE outcome NOT IN ('trained', 'open') GROUP BY run_id, outcome, cause
    UNION ALL
    SELECT m.run_id, 'no_logprobs', 'trained', count(DISTINCT m.rollout_id), sum(m.num_without_logprobs)::BIGINT
    FROM log.members m JOIN outcomes o ON o.rollout_id = m.rollout_id JOIN jobs j ON j.job_id = m.job_id
    WHERE m.num_without_logprobs > 0 AND m.policy = 'model' AND o.outcome = 'trained' AND j.kind = 'rl' GROUP BY m.run_id
) ORDER BY run_id, num_tokens DESC, cause;

CREATE OR REPLACE VIEW staleness AS
SELECT run_id, version, min(staleness) AS min_staleness, avg(staleness) AS mean_staleness, max(staleness) AS max_staleness,
    count(*) AS num_trajectories
FROM batch_members GROUP BY run_id, version ORDER BY run_id, version;

CREATE OR REPLACE VIEW example_difficulty AS
SELECT run_id, example_id, avg(reward) AS mean_reward, stddev_pop(reward) AS reward_std,
    count(DISTINCT rollout_id) AS num_rollouts, count(DISTINCT group_id) AS groups
FROM log.members WHERE policy = 'model' AND purpose = 'train'
GROUP BY run_id, example_id ORDER BY run_id, mean_reward, example_id;

CREATE OR REPLACE VIEW lineage AS
SELECT s.run_id, s.rollout_id, s.step_index, s.agent, s.event_type, s.min_version AS sampled_version, j.trajectory_id,
    s.group_id, b.batch_id, b.staleness, t.version AS training_step, w.version, w.weights_sha256
FROM log.step_recorded s
LEFT JOIN log.trajectory_assembled j ON j.rollout_id = s.rollout_id AND j.agent = s.agent
LEFT JOIN batch_members b ON b.trajectory_id = j.trajectory_id
LEFT JOIN training_steps t ON t.batch_id = b.batch_id
LEFT JOIN weight_versions w ON w.model_group = t.model_group AND w.version = t.version;
