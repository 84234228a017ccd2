//! Accounting for boots that no init of ours recorded: any story, also an absurd one, gives an
//! account that adds up. The stories are made at random, from a fixed seed.

use kata_gpu_report::analysis::blame::{By, blame};
use kata_gpu_report::analysis::critical_path::{critical_path, gain};
use kata_gpu_report::boot::coverage::coverage;
use kata_gpu_report::boot::story::{Milestone, RawStep, Story};
use kata_gpu_report::boot::timeline::Timeline;
use kata_gpu_wire::catalogue::steps as known_steps;

/// Numbers that look random and are the same on every machine (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Mostly a time within a boot of 1,000 ns, so that many coincide; now and then an absurd one.
    fn time(&mut self) -> i64 {
        match self.below(40) {
            0 => i64::MAX,
            1 => i64::MIN,
            2 => -(self.below(500) as i64),
            _ => 50 * self.below(20) as i64,
        }
    }
}

fn story(numbers: &mut Numbers) -> Story {
    let steps = 1 + numbers.below(24) as usize;
    let known: Vec<&str> = known_steps().map(|row| row.name).collect();
    let index = |numbers: &mut Numbers| numbers.below(steps as u64 + 2) as usize;
    let step = |numbers: &mut Numbers| RawStep {
        name: if numbers.chance(90) {
            known[numbers.below(known.len() as u64) as usize].into()
        } else {
            "imported".into()
        },
        begin_ns: numbers.time(),
        end_ns: numbers.chance(90).then(|| numbers.time()),
        parent: numbers.chance(30).then(|| index(numbers)),
        after: (0..numbers.below(4)).map(|_| index(numbers)).collect(),
        follows: (0..numbers.below(2)).map(|_| index(numbers)).collect(),
        ..RawStep::default()
    };
    let milestone = |numbers: &mut Numbers, name: &str| Milestone {
        name: name.into(),
        at_ns: numbers.time(),
        after: (0..numbers.below(3)).map(|_| index(numbers)).collect(),
        ..Milestone::default()
    };
    Story {
        milestones: ["a", "b", "c"]
            .map(|name| milestone(numbers, name))
            .to_vec(),
        steps: (0..steps).map(|_| step(numbers)).collect(),
        last_ns: numbers.time(),
        missing: Vec::new(),
    }
}

#[test]
fn every_story_gives_an_account_that_adds_up() {
    let mut numbers = Numbers(0x5eed);
    let (mut accounts, mut gains, mut off_path, mut gaps, mut cut) = (0, 0, 0, 0, 0);
    for round in 0..3000 {
        let timeline = Timeline::new(story(&mut numbers));
        let Ok(window) = timeline.window(None, None) else {
            continue;
        };
        let wall = window.wall_ns();
        accounts += 1;

        let covered = coverage(&timeline, &window);
        assert_eq!(
            covered.explained_ns + covered.unexplained_ns,
            wall,
            "round {round}: coverage and gaps are the wall time"
        );
        gaps += covered.gaps.len();

        for by in [By::Owner, By::Phase] {
            let account = blame(&timeline, &window, by);
            let times = account
                .groups
                .iter()
                .flat_map(|g| g.steps.iter().map(|s| s.time).chain([g.time]));
            for time in times.chain(account.waiting.iter().map(|s| s.time)) {
                assert!(
                    time.wall_ns <= wall
                        && time.wall_ns <= time.sum_ns
                        && time.longest_ns <= time.wall_ns,
                    "round {round}: {time:?}"
                );
            }
        }

        let path = critical_path(&timeline, &window, 3);
        cut += path.cut;
        let mut at = window.from.at_ns;
        for piece in &path.path {
            assert_eq!(piece.begin_ns, at, "round {round}: the path has no hole");
            at = at.wrapping_add_unsigned(piece.took_ns);
        }
        assert_eq!(
            at, window.to.at_ns,
            "round {round}: the path ends where the window does"
        );
        for (i, step) in timeline.steps.iter().enumerate() {
            let (sure, at_most) = gain(&timeline, &window, &[i]);
            assert!(
                sure <= at_most && at_most <= wall,
                "round {round}: what is sure is possible"
            );
            // The path may have another step of the same name; such a step is not checked here.
            if path
                .path
                .iter()
                .all(|p| p.step.as_deref() != Some(step.title().as_str()))
                && step.begin_ns >= window.from.at_ns
            {
                assert_eq!(
                    at_most, 0,
                    "round {round}: {} is not on the path and brings {at_most}",
                    step.name
                );
                off_path += 1;
            }
            gains += usize::from(at_most > 0);
        }
        for found in path.without_step.iter().chain(&path.without_kind) {
            assert!(
                found.at_most_ns <= found.on_path_ns,
                "round {round}: {found:?}"
            );
        }
    }
    // Each case occurred: an account in which nothing ever happens would pass all of the above.
    assert!(
        accounts > 1500 && gains > 3000 && off_path > 3000 && gaps > 1500 && cut > 0,
        "{accounts} {gains} {off_path} {gaps} {cut}"
    );
}

/// The founding boot as somebody would import it: a dozen lines of logs, no records of ours.
fn imported() -> Story {
    let s = |seconds: f64| (seconds * 1e3).round() as i64 * 1_000_000;
    let mut steps = vec![
        RawStep {
            name: "vmm".into(),
            begin_ns: s(-2.0),
            end_ns: Some(s(0.0)),
            ..RawStep::default()
        },
        RawStep {
            name: "kernel".into(),
            begin_ns: s(0.0),
            end_ns: Some(s(1.5)),
            ..RawStep::default()
        },
        RawStep {
            name: "module.load".into(),
            detail: "nvidia".into(),
            begin_ns: s(2.0),
            end_ns: Some(s(26.0)),
            ..RawStep::default()
        },
    ];
    for gpu in 0..7 {
        let begin = 2.0 + 3.4 * f64::from(gpu);
        let probe = RawStep {
            name: "gpu.map".into(),
            begin_ns: s(begin),
            end_ns: Some(s(begin + 3.4)),
            parent: Some(2),
            ..RawStep::default()
        };
        steps.push(probe);
    }
    steps.push(RawStep {
        name: "nvidia-ctk".into(),
        begin_ns: s(26.1),
        end_ns: Some(s(84.0)),
        ..RawStep::default()
    });
    let at = |name: &str, seconds| Milestone {
        name: name.into(),
        at_ns: s(seconds),
        ..Milestone::default()
    };
    Story {
        steps,
        milestones: vec![
            at("VM start", -2.0),
            at("kernel start", 0.0),
            at("last container", 84.5),
        ],
        last_ns: s(84.5),
        missing: Vec::new(),
    }
}

#[test]
fn a_boot_of_logs_alone_has_owners_a_path_and_no_promise() {
    let timeline = Timeline::new(imported());
    let window = timeline.window(None, None).unwrap();
    assert_eq!(window.wall_ns(), 86_500_000_000);
    let owners: Vec<(&str, u64)> = blame(&timeline, &window, By::Owner)
        .groups
        .iter()
        .map(|g| (g.name, g.time.wall_ns / 100_000_000))
        .collect();
    assert_eq!(
        owners,
        [
            ("?", 579),
            ("host", 238),
            ("vmm", 20),
            ("kernel", 15),
            ("driver", 2)
        ]
    );
    let path = critical_path(&timeline, &window, 3);
    let ctk = &path.without_kind[0];
    assert_eq!(
        (ctk.step.as_str(), ctk.gain_ns, ctk.at_most_ns),
        ("nvidia-ctk", 0, 57_900_000_000),
        "nobody recorded what waited for it"
    );
    assert_eq!(coverage(&timeline, &window).unexplained_ns, 1_100_000_000);
}
