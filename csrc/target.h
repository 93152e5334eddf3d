// GRPO_TARGET_BEGIN and GRPO_TARGET_END: functions between them are compiled for the instruction
// sets in GRPO_TARGET, or for every machine if it is not defined.
//
// Include other headers first: their functions must stay callable on every machine. With g++ the
// set lasts to the end of the file, because templates are compiled there.
#pragma once

#define GRPO_PRAGMA_OF(...) _Pragma(#__VA_ARGS__)
#define GRPO_PRAGMA(...) GRPO_PRAGMA_OF(__VA_ARGS__)

#if !defined(GRPO_TARGET)
#define GRPO_TARGET_BEGIN
#define GRPO_TARGET_END
#elif defined(__clang__)
#define GRPO_ATTRIBUTE __attribute__((target(GRPO_TARGET)))
#define GRPO_TARGET_BEGIN GRPO_PRAGMA(clang attribute push(GRPO_ATTRIBUTE, apply_to = function))
#define GRPO_TARGET_END GRPO_PRAGMA(clang attribute pop)
#else
#define GRPO_TARGET_BEGIN GRPO_PRAGMA(GCC target(GRPO_TARGET))
#define GRPO_TARGET_END
#endif
