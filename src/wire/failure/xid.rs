//! Meaning of Xids, a sentence each, and what to do: in own words after NVIDIA's catalogue of
//! Xids (docs.nvidia.com/deploy/xid-errors, Table 1).

use super::reason::{Reason, Whose};

/// Meaning of an Xid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xid {
    pub number: u32,
    pub whose: Whose,
    /// Whether the GPU goes on: containers keep it.
    pub goes_on: bool,
    pub what: &'static str,
    pub cure: &'static str,
}

const PROGRAM: &str = "look at the program that used the GPU (its pid is in the message), with \
    compute-sanitizer; the GPU is healthy";
const RESET: &str = "drain the GPU and reset it on the host";
const REPLACE: &str = "drain the GPU, reset it on the host, run NVIDIA's field diagnostics, and have it \
    replaced if they fail";
const LINK: &str = "look at the fabric manager's log and at the link's partner; reset all GPUs of the \
    fabric together, and check seating and cables if it comes again";

macro_rules! xids {
    ($($number:literal $whose:ident $goes_on:literal, $what:expr, $cure:expr;)+) => {
        const XIDS: &[Xid] = &[$(Xid {
            number: $number,
            whose: Whose::$whose,
            goes_on: $goes_on,
            what: $what,
            cure: $cure,
        }),+];
    };
}

xids! {
    8 Pod true, "a program's work was stopped after a time-out", PROGRAM;
    11 Pod true, "a program sent an invalid command", PROGRAM;
    13 Pod true, "a program made an engine fail", PROGRAM;
    31 Pod true, "a program touched GPU memory that it does not have", PROGRAM;
    32 Pod true, "a program's command stream was damaged", PROGRAM;
    43 Pod true, "a program's channel was stopped after its own error", PROGRAM;
    45 Pod true, "channels were cleaned up after another error or the program's end",
        "look for the Xid before it";
    46 Gpu false, "the GPU stopped processing", RESET;
    48 Gpu false, "GPU memory had an error that ECC cannot correct",
        "drain the GPU and reset it on the host: the row is remapped by the reset";
    61 Gpu false, "a microcontroller of the GPU stopped", RESET;
    62 Gpu false, "a microcontroller of the GPU halted", RESET;
    63 Gpu true, "a row of GPU memory is to be remapped",
        "reset the GPU on the host when it is idle: the remapping takes effect then";
    64 Gpu false, "a row of GPU memory could not be remapped", REPLACE;
    68 Pod true, "the video decoder failed for a program", PROGRAM;
    69 Pod true, "a program made the graphics engine fail", PROGRAM;
    74 Fabric false, "an NVLink had an error", LINK;
    79 Gpu false, Reason::OffTheBus.what(), Reason::OffTheBus.cure();
    92 Gpu true, "GPU memory has many corrected errors",
        "watch it; run NVIDIA's field diagnostics when the GPU is idle";
    94 Gpu true, "a memory error was contained: it ended only the program that used the row",
        "restart that program; reset the GPU on the host when it is idle";
    95 Gpu false, "a memory error was not contained: any program may have wrong data", RESET;
    109 Gpu false, "a switch between programs timed out", RESET;
    110 Gpu false, "the GPU reported a security fault",
        "reset the GPU on the host; if it comes again, give NVIDIA the log";
    119 Gpu false, "the GPU's own processor (GSP) did not answer a call",
        "reset the GPU on the host; if it comes again, try another release of the driver";
    120 Gpu false, "the firmware of the GPU's own processor (GSP) failed",
        "reset the GPU on the host; if it comes again, try another release of the driver";
    121 Gpu true, "the link between CPU and GPU (C2C) corrected an error",
        "reset the GPU on the host when it is idle, if it comes again";
    136 Gpu false, "the training of a link failed", LINK;
    137 Pod true, "a program touched memory of another GPU over NVLink that it does not have", PROGRAM;
    140 Gpu false, "GPU memory had an error that was not recovered", RESET;
    143 Gpu false, "the GPU could not be initialised",
        "reset the GPU on the host; if it stays, try another release of the driver";
    144 Fabric false, "an NVLink had an error (SAW)", LINK;
    145 Fabric false, "an NVLink had an error (RLW)", LINK;
    146 Fabric false, "an NVLink had an error (TLW)", LINK;
    147 Fabric false, "an NVLink had an error (TREX)", LINK;
    148 Fabric false, "an NVLink had an error (NVLPW)", LINK;
    149 Fabric false, "an NVLink had an error (netir)", LINK;
    150 Fabric false, "an NVLink had an error (MSE)", LINK;
    151 Gpu false, "keys of a confidential session could not be renewed",
        "restart the guest; the GPU needs a reset on the host before it";
    154 Gpu false, "the driver says what this GPU needs after the errors before",
        "do what the message names: reset the GPU, the host or the guest; look for the Xid before";
    155 Fabric false, "an NVLink went down", LINK;
    156 Gpu true, "a resource of the GPU was retired", "reset the GPU on the host when it is idle";
    158 Gpu false, "the GPU timed out for good", RESET;
}

/// Meaning of an Xid; `None` for one without a sentence here.
pub fn meaning(number: u32) -> Option<&'static Xid> {
    XIDS.iter().find(|xid| xid.number == number)
}
