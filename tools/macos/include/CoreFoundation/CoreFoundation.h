// What metal-cpp takes from Apple's CoreFoundation, for a build without the
// macOS SDK. Declarations only: nothing of it is called by this package.
#pragma once

typedef double CFTimeInterval;
typedef const struct __CFString* CFStringRef;

#ifdef __cplusplus
extern "C" {
#endif
CFStringRef __CFStringMakeConstantString(const char* text);
#ifdef __cplusplus
}
#endif
